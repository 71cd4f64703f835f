"""Comparison of tiny models of many architectures with plain transformers."""
