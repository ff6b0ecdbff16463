"""Keras models on TensorFlow, trained on the devices of a mesh.

    fit           trains a compiled model, as Model.fit does.
    evaluate      evaluates a compiled model.
    plan          predicts memory, communication and time of a training step on any machine.
    verify        compares a training step over a mesh with one device.
    Checkpoints   the folder that training saves to and resumes from.
    gshard_layer  a layer of this package, such as a mixture of experts, within a Keras model.

    >>> model = keras.Sequential([keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> x, y = np.ones((8, 4), np.float32), np.ones((8, 1), np.float32)
    >>> history = gshard.keras.fit(model, x, y, mesh="data=2", batch_size=8, verbose=0)
    >>> sorted(history.history)
    ['loss']

docs/keras.md is the tutorial.
"""

from lingvo_gshard.keras.checkpoints import Checkpoints
from lingvo_gshard.keras.fitting import evaluate, fit
from lingvo_gshard.keras.gshard_layer import gshard_layer
from lingvo_gshard.keras.planned import plan
from lingvo_gshard.keras.verified import verify

__all__ = ["Checkpoints", "evaluate", "fit", "gshard_layer", "plan", "verify"]
