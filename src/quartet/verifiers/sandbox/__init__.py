"""Sandbox for programs that no one has read: no network, read-only files, and limits of time, memory, processes and output."""
