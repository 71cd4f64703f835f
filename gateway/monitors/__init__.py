"""Poll live runs and their services."""
