"""Sweeps: runs over a grid of settings and seeds. Imports no torch."""
