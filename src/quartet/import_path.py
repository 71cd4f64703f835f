"""Puts the working directory last among the places of modules, where ``python -m`` puts it first. Imported before all else.

Otherwise a redis.py or queue.py of the user's would be imported in the place of the library that is meant.
"""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    sys.path.append(sys.path.pop(0))
