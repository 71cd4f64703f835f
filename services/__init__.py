"""Four model services and the orchestrator. Entry point: ``python -m quartet.services ROLE...``."""
