"""The config: one typed tree, loaded from the same YAML file on a laptop, in Compose and in Helm. Does not import torch."""
