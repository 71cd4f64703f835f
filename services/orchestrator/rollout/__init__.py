"""Generation and scoring of a step's trajectories, and evaluation of the policy on validation prompts."""
