"""Benchmarks that the documentation quotes. Each is a separate command that writes its table into a page."""
