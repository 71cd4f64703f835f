"""The processes of a run. Entry point: ``python -m quartet.services ROLE...``."""
