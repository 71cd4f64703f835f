"""Triton Inference Servers as a generation engine."""
