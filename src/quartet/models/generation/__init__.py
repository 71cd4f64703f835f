"""Generation engines: torch and Triton behind one interface."""
