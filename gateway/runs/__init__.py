"""Find, summarize, start and command runs."""
