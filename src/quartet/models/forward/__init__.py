"""Forward passes over ragged batches: batching, packing, log-probs, values and scores."""
