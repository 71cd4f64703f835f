"""Policy and value updates: mini-batches, optimizer, memory limits and the update log."""
