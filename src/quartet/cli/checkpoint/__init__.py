"""Commands for the checkpoints of a run."""
