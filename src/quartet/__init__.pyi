from quartet import errors as errors
from quartet.api import Completion as Completion
from quartet.api import Config as Config
from quartet.api import Run as Run
from quartet.api import RunTrajectory as RunTrajectory
from quartet.api import generate as generate
from quartet.api import load_config as load_config
from quartet.api import train as train

__version__: str
