"""The reward service: scores from a reward model, a function or an ensemble."""
