"""Server-sent events: the history of a run, read from its files, and the live state of its processes."""
