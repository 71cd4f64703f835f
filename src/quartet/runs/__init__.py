"""Start a run on this machine and follow it to its end; control an active run through its gateway."""
