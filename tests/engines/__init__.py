"""Every generation engine held to one contract, the Triton engine against a real server."""
