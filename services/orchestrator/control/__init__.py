"""Operator commands, live settings, guards and run progress."""
