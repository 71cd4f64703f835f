"""Worker groups of a service: the processes, and the commands that rank 0 passes to the other ranks."""
