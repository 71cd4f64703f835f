"""Server-sent events, read from the files of a run."""
