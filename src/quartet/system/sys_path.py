"""Move the working directory from the start of ``sys.path``, where ``python -m`` puts it, to the end. Import this first.

Otherwise a file of the user, such as redis.py or queue.py, would be imported instead of the library.
"""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    sys.path.append(sys.path.pop(0))
