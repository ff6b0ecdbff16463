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

docs/python_api.md shows the API at work. Examples in docstrings begin with `import lingvo_gshard as
gshard`. Importing the package alone imports neither TensorFlow nor jax.
"""

import lazy_loader

from lingvo_gshard.core import VERSION

__version__ = VERSION
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
