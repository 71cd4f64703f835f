"""Generation engines: torch, TensorRT-LLM and Triton behind one interface."""
