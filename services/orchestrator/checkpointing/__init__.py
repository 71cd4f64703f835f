"""Commit of steps, checkpoints, and recovery to the last committed step."""
