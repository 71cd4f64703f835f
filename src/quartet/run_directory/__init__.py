"""The files of a run directory: their names, formats, durable writes and checks."""
