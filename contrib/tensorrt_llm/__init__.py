"""TensorRT-LLM as a generation engine."""
