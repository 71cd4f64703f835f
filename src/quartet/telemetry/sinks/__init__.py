"""Metric sinks besides the run's files: TensorBoard and trackers. None can fail or slow down a run."""
