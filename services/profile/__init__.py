"""Profiles of a process: its operators, kernels and gaps during some steps."""
