"""User commands, live settings, guards and the progress that watchers see."""
