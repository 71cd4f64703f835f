"""Commit steps, write checkpoints and recover from the last commit."""
