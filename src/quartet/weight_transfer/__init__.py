"""Transfer of policy weights between processes: versions, digests and lossless deltas. Only process groups import torch."""
