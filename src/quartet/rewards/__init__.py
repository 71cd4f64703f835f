"""Reward sources: what scores a response. Sequence classifiers, the user's own Python functions, and weighted sums of these."""
