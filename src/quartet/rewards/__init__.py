"""Reward sources, which score responses: models, functions of the user, scorers in other processes, judges, and weighted sums."""
