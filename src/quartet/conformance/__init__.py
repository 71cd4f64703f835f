"""Conformance of services with the contract in proto/quartet/v1. A service may be written in any language.

The checks are a client that sees the messages themselves, also those that Quartet's own clients never send.
"""
