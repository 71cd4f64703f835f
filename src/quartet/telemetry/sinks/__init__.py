"""Where a run's figures go besides its own files: TensorBoard, Weights & Biases, MLflow. None of them can fail or slow a run."""
