"""A pretended GPU over CPU values, and tests of the code that runs on a GPU."""
