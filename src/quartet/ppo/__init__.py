"""The numerics of PPO as pure tensor functions. Torch only: no models, no services, no state but the KL coefficient.

Everything is ragged: one flat tensor [tokens] over all response tokens, sequence after sequence, and ``lengths``
[sequences]. Padding exists only inside a function, never in a result. Log-probs and KL are in nats. Statistics and
recursions over a whole batch are computed in float64 and returned in the dtype they came in.

One PPO step, from scores to gradients::

    k = kl.kl_estimate(log_probs, reference_log_probs, "k1")                  # per token
    scores = rewards.penalize_truncated(scores, truncated, penalty)           # or scale_truncated
    r = rewards.token_rewards(scores, k, lengths, controller.value)           # score on the last response token
    a = gae.generalized_advantages(r, values, lengths, gamma, gae_lambda)     # advantages, returns
    mask = rewards.mask_truncated(truncated, lengths)                         # or all ones
    advantages = statistics.whiten(a.advantages, shift_mean=True, mask=mask)

    for each mini-batch, with tokens = its token count over all micro-batches and ranks:
        for each micro-batch:
            new = distributions.token_log_probs(logits, token_ids, temperature)
            losses.policy_loss(new, log_probs, advantages, mask, 0.2, 0.2, 0.0, tokens).loss.backward()
            losses.value_loss(new_values, values, a.returns, 0.2, tokens).loss.backward()      # on the critic

    controller.update(float(ragged.sequence_sum(k, lengths).mean()), responses=len(lengths))

The actor's denominator counts the tokens its mask keeps, the critic's counts all response tokens.
"""
