"""Engines and environments that few need, each with its README, extra and tests."""
