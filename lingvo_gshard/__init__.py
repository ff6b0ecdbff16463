"""GShard for TensorFlow: giant Transformers written as if for one device.

The public API, in the order of a session:

    experiments    names of the experiments that come with the package
    experiment     the Params of one, with settings
    plan           memory, communication and time of a training step on machines that are not here
    train          trains an experiment
    load           a trained run: translate, generate, evaluate
    partition      any annotated TensorFlow function on the devices of a mesh

docs/python_api.md shows it at work. Importing the package alone imports neither TensorFlow nor jax.
"""

import importlib

__version__ = "0.1.0"

# Name -> the module that has it, imported on first use.
_API = {
    "DecodingOptions": "options",
    "RuntimeOptions": "options",
    "SamplingOptions": "options",
    "experiment": "experiments",
    "experiments": "experiments",
    "load": "run",
    "partition": "partitioning",
    "plan": "planning",
    "train": "training",
}
__all__ = list(_API)


def __getattr__(name: str) -> object:
    """Imports a name of the public API on first use."""
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"lingvo_gshard.api.{_API[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
