"""The numerics of PPO as pure functions of tensors. The only state is the KL coefficient and the score moments.

Batches are ragged: one flat tensor [tokens] holds all response tokens, sequence after sequence, with ``lengths`` [sequences].
Padding exists only inside functions. Log-probs and KL are in nats. Statistics and recursions over a whole batch are computed in
float64 and returned in the dtype of the input.

One PPO step, from scores to gradients::

    k = kl.kl_estimate(log_probs, reference_log_probs, "k1")                  # per token
    scores = rewards.penalize_truncated(scores, truncated, penalty)           # or scale_truncated
    r = rewards.token_rewards(scores, k, lengths, controller.value)           # score on the last response token
    a = gae.generalized_advantages(r, values, lengths, gamma, gae_lambda)     # advantages, returns
    mask = rewards.mask_truncated(truncated, lengths)                         # or all ones
    advantages = statistics.whiten(a.advantages, shift_mean=True, mask=mask)

    for each mini-batch, over all micro-batches and ranks:
        weights = losses.loss_weights(mask, lengths, "token_mean")
        trust = weights * rollout_correction.importance_weights(old_log_probs, log_probs, mask, lengths, correction).weights
        for each micro-batch of whole responses:
            new = distributions.token_log_probs(logits, token_ids, temperature)
            inputs = losses.PolicyLossInput(new, old_log_probs, log_probs, advantages, mask != 0, trust, lengths, 0.2, 0.2)
            policy_losses.clipped(inputs).loss.backward()
            losses.value_loss(new_values, values, a.returns, 0.2, tokens).loss.backward()      # on the critic

    controller.update(float(ragged.sequence_sum(k, lengths).mean()), responses=len(lengths))

Without a critic, advantages come from ``critic_free_advantages``, for example ``rloo_advantages(sequence_rewards(scores, k,
lengths, beta), groups)``. The weights of the policy loss count the tokens that the mask keeps. The denominator of the value loss
counts all tokens.
"""
