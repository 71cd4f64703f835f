"""Measurements that Quartet's documentation quotes. Each is a command of its own that writes its table into the page."""
