"""The processes: four model services and the orchestrator, behind one entry point, ``python -m quartet.services ROLE...``."""
