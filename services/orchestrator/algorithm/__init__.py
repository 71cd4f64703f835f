"""Turn rollouts into training signals: advantages, KL coefficient, experience and update requests."""
