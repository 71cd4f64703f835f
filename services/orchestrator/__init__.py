"""The orchestrator: the algorithm. It turns trajectories into experience and experience into updates."""
