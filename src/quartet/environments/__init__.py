"""Environments for trajectories of several turns. This package's root imports only the standard library."""

from quartet.environments.environment import Environment, EnvironmentFailed, Message, Observation

__all__ = ["Environment", "EnvironmentFailed", "Message", "Observation"]
