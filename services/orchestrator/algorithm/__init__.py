"""From rollouts to training signals: advantages, KL coefficient, experience and update requests."""
