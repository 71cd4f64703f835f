"""Evidence that runs learn: algorithms over model seeds and run seeds, PPO and RLOO beside TRL."""
