"""Scripts that run inside the sandbox. They import only the standard library, and run on Python 3.10 or newer."""
