"""gshard-train with an experiment that trains on prepared data in a second; run by tests."""

import sys

from lingvo_gshard.core.config import registry
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.tools import train
from lingvo_gshard.tools.console import process_start, startup
from lingvo_gshard.tools.console.process_start import SignalWatch
from lingvo_gshard.wings.preparation.prepared.translation_input import PreparedTranslationInput
from tests import tiny


class BigramTask(tiny.TinyTask):
    """Guesses each target token, modulo 5, from the one before, modulo 6."""

    @layer_method
    def loss(self, theta, batch):
        is_token = tf.cast(batch["target_segments"] > 0, tf.int32)
        before = tf.one_hot(batch["target_inputs"] * is_token % tiny.INPUTS, tiny.INPUTS)
        labels = batch["target_labels"] * is_token % tiny.CLASSES
        flat = {"x": tf.reshape(before, [-1, tiny.INPUTS]), "y": tf.reshape(labels, [-1])}
        return super().loss(theta, flat)


@registry.register("test.prepared")
def prepared_experiment() -> Params:
    """Trains on the directory `prepared`.

    gshard-train --experiment=test.prepared --logdir=runs/prepared
    """
    params = tiny.experiment_params()
    params.task = BigramTask.params()
    params.input = PreparedTranslationInput.params().set(
        directory="prepared",
        batch_rows=8,
        source_length=48,
        target_length=28,
        packing_window=100,
    )
    params.run.log_every_steps = 1
    params.run.checkpoint_every_steps = 5
    return params


if __name__ == "__main__":
    process_start.open_closed_streams()
    with SignalWatch(train.NAME):
        sys.exit(startup.guarded(train.NAME, train.main)(sys.argv))
