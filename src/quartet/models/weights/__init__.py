"""Model weights: load, adapt with LoRA, freeze and write them."""
