"""The rollout buffer: trajectories and sealed experience over Redis. The only package that knows Redis."""
