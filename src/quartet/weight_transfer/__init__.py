"""Transfer of policy weights between processes: versions, digests and lossless deltas. Imports neither torch nor transformers."""
