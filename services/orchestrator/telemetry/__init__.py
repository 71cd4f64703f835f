"""Timings, metrics and sinks of a run."""
