"""Starting a run's processes on this machine, watching and restarting them, and leaving none behind."""

from quartet.launcher.launcher import Launcher

__all__ = ["Launcher"]
