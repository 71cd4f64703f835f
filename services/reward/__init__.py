"""The reward: a frozen scorer, whatever its source."""
