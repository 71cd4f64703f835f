"""The critic: the value model. It computes values and takes value updates."""
