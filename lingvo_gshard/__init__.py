"""GShard for TensorFlow: giant Transformers written as if for one device.

The public API, in the order of a session:

    experiments    names of the experiments that come with the package
    experiment     the Params of one experiment, with settings
    describe       the hyperparameters of an experiment with their meaning, as gin
    plan           memory, communication and time of a training step on any machine
    plan_generation  memory, communication and time of generation with a language model; the
                   largest batch that fits
    prepare        raw text to tokenized shards for training; preparation_params has settings
    train          trains an experiment
    load           a trained run: translate, generate, evaluate
    report         curves, scores and environment of one or several runs, as data and as a page
    import_model   a run from a published model: config.json, safetensors, tokenizer
    open_model     the Params of a published model, from its config.json alone
    verify         proof that a partitioned step computes what one device computes
    partition      any annotated TensorFlow function on the devices of a mesh
    keras          Keras models on the devices of a mesh: fit, evaluate, plan, verify

docs/python_api.md shows the API at work. Importing the package alone imports neither TensorFlow nor
jax.
"""

import importlib
import typing

from lingvo_gshard.core.version import VERSION

__version__ = VERSION

# The modules of lingvo_gshard.api, imported on the first use of one of their names.
_MODULES = {
    "experiments": ("describe", "experiment", "experiments"),
    "export": ("DecoderSettings",),
    "importing": ("import_model", "open_model"),
    "options": ("ClusterOptions", "RuntimeOptions"),
    "partitioning": ("partition", "verify"),
    "planning": ("plan", "plan_generation"),
    "preparation": ("PrepareOptions", "Source", "preparation_params", "prepare"),
    "run": ("DecodingOptions", "Run", "load", "report"),
    "training": ("train",),
}
_API = {name: module for module, names in _MODULES.items() for name in names}
__all__ = [
    "ClusterOptions",
    "DecoderSettings",
    "DecodingOptions",
    "PrepareOptions",
    "Run",
    "RuntimeOptions",
    "Source",
    "describe",
    "experiment",
    "experiments",
    "import_model",
    "keras",
    "load",
    "open_model",
    "partition",
    "plan",
    "plan_generation",
    "preparation_params",
    "prepare",
    "report",
    "train",
    "verify",
]

if typing.TYPE_CHECKING:
    from lingvo_gshard import keras
    from lingvo_gshard.api.experiments import describe, experiment, experiments
    from lingvo_gshard.api.export import DecoderSettings
    from lingvo_gshard.api.importing import import_model, open_model
    from lingvo_gshard.api.options import ClusterOptions, RuntimeOptions
    from lingvo_gshard.api.partitioning import partition, verify
    from lingvo_gshard.api.planning import plan, plan_generation
    from lingvo_gshard.api.preparation import PrepareOptions, Source, preparation_params, prepare
    from lingvo_gshard.api.run import DecodingOptions, Run, load, report
    from lingvo_gshard.api.training import train


def __getattr__(name: str) -> object:
    """Imports a name of the public API on first use."""
    if name == "keras":
        return importlib.import_module("lingvo_gshard.keras")
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"lingvo_gshard.api.{_API[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    """Returns the public names."""
    return [*__all__, "__version__"]
