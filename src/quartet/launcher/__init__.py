"""Start a run's processes on this machine, supervise and restart them, and stop all of them at the end."""
