"""Prints what a pyproject.toml says that its package needs, for pip, so that it can be installed before the package is there."""

import sys
import tomllib

if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        print("\n".join(tomllib.load(file)["project"]["dependencies"]))
