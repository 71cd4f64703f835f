"""The reward model: a frozen scorer."""
