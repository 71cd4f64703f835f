"""The actor: the policy. It generates responses, computes log-probs and takes PPO updates."""
