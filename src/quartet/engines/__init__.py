"""Generation engines that hold their own copy of the weights. Imports neither torch nor transformers.

A generator process runs one of them in the engine's own environment. Each module imports its engine when the engine is created.
"""
