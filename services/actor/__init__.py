"""The actor: the policy. It generates, recomputes log-probs and takes PPO updates."""
