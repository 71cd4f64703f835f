"""Model weights: loading, LoRA adapters, freezing and snapshots."""
