"""The generator: an engine in a separate process, which pulls the policy's weights."""
