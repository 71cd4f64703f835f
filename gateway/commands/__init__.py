"""Start runs and send commands to them; record each command in the run's audit log."""
