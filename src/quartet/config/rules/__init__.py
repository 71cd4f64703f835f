"""Conditions between the sections of a config. A rule raises ValueError for the first setting that contradicts it."""
