"""Mutual TLS, tokens and the list of roles that may call each method."""
