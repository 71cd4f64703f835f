"""Reward sources, which score responses: sequence classifiers, Python functions of the user, and weighted sums of both."""
