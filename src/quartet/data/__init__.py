"""Prompts: read from files and data sets, tokenized once, and assigned to the steps in an order that the seed determines."""
