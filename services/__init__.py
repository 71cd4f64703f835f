"""The processes: four model services and the orchestrator, behind one entry point, ``python -m services ROLE...``."""
