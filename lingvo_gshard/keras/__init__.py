"""Keras models on TensorFlow, trained on the devices of a mesh.

    fit         trains a compiled model, as Model.fit does, over a mesh
    evaluate    evaluates it, as Model.evaluate does
    plan        memory, communication and time of its training step on any machine
    verify      proof that the step over a mesh computes what one device computes
    Checkpoints where, and how often, `fit` saves what it resumes from
    gshard_layer a layer of this package, such as a mixture of experts, within a Keras model

docs/keras.md is the tutorial.
"""

from lingvo_gshard.keras.checkpoints import Checkpoints
from lingvo_gshard.keras.fitting import evaluate, fit
from lingvo_gshard.keras.gshard_layer import gshard_layer
from lingvo_gshard.keras.planned import plan
from lingvo_gshard.keras.verified import verify

__all__ = ["Checkpoints", "evaluate", "fit", "gshard_layer", "plan", "verify"]
