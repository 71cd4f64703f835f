"""The critic: the value model. It values states and takes value updates."""
