"""Files of models: hub, downloads, adapters, shapes and memory. Does not import torch."""
