"""The environment service: episodes of a user's environment class, for trajectories of several turns."""
