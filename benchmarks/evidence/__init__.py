"""Evidence that runs learn: algorithms over model seeds and run seeds, and PPO and RLOO beside TRL. See docs/evidence.md."""
