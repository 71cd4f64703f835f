"""Metric sinks besides the run's files: TensorBoard, Weights & Biases, MLflow. None can fail or slow down a run."""
