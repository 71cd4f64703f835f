"""Print the dependencies of a pyproject.toml for pip, so that an image layer can install them before the package itself.

``requirements.py PYPROJECT [EXTRA ...]``
"""

import sys
import tomllib

if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        project = tomllib.load(file)["project"]
    extras = [name for extra in sys.argv[2:] for name in project["optional-dependencies"][extra]]
    print("\n".join([*project["dependencies"], *extras]))
