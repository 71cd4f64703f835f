"""The rollout buffer: trajectories and sealed experience in Redis. No other package talks to Redis."""
