"""Imports gshard-train and its libraries: the fork server loads this module before it forks."""

from lingvo_gshard.core import lazy
from lingvo_gshard.runtime import single_device, spmd  # noqa: F401
from lingvo_gshard.tools import train  # noqa: F401
from lingvo_gshard.tools.console import startup

startup.prepare_libraries()
_VERSIONS = lazy.tf.__version__, lazy.jax.__version__, lazy.ocp.__version__
