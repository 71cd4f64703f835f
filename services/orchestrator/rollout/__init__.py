"""Generate and score the trajectories of a step, and evaluate the policy on validation prompts."""
