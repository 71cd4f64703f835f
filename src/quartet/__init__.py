"""Quartet: RLHF training as microservices."""

__version__ = "0.1.0"
