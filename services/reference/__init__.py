"""The reference: the frozen initial policy."""
