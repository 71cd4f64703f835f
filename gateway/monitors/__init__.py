"""Poll the processes of active runs: orchestrator, services and Redis."""
