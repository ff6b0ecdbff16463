# tests: tasks/token_task.py, wings/long_inputs/chunked_loss.py
"""Compares tasks whose logits are computed in chunks with the same tasks with all logits."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.tasks import LanguageModelTask
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings.fine_tuning.lora import LoRA
from tests.tasks.test_language_model import M, V, batch_of, tensors

KEY = np.array([1, 2], np.int32)
EVERYTHING = {
    "use_logit_bias": True,
    "logit_cap": 3.0,
    "logit_scale": 0.5,
    "label_smoothing": 0.1,
    "z_loss_weight": 0.01,
}
CASES = {
    "tied": {},
    "its own weight": {"tie_softmax": False},
    "everything": EVERYTHING,
    "everything, its own weight": {**EVERYTHING, "tie_softmax": False},
    "future tokens": {"future_tokens": 2},
    "adapters": {
        "tie_softmax": False,
        "lora": LoRA.params().set(rank=2, weights=("softmax", "*.w_query")),
    },
}


def params_of(positions, **values):
    p = LanguageModelTask.params().set(vocabulary_size=V, model_dim=M, logits_positions=positions)
    p.decoder.set(num_layers=1, num_heads=2, hidden_dim=12, moe_every=0)
    return p.set(**values)


def step(trainer, theta):
    """Returns the loss, the metrics by name, and the gradients by path."""
    loss, metrics, gradients = trainer.gradients(theta, tensors(batch_of()), tf.constant(KEY))
    return loss, {name: value for name, (value, _) in metrics.items()}, gradients


class ChunkedLogitsTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(*CASES)
    def test_steps_equal_those_with_all_logits(self, case):
        """In eager mode a loop runs in Python."""
        self.check(case, 1, compiled=False)

    @parameterized.parameters("everything", "adapters")
    @pytest.mark.slow
    def test_compiled_steps_with_micro_batches_equal_those_with_all_logits(self, case):
        self.check(case, 2, compiled=True)

    def check(self, case, micro_batches, compiled):
        found = []
        for positions in (0, 4):
            options = Trainer.params().set(micro_batches=micro_batches)
            trainer = options.instantiate(params_of(positions, **CASES[case]))
            theta = trainer.init_state().theta.transform(lambda w: w + 0.1 * tf.cos(1.0 + w))
            run = tf.function(step, jit_compile=True, autograph=False) if compiled else step
            found.append(run(trainer, theta))
        whole, chunked = found
        self.assertAllClose(chunked[0], whole[0], rtol=2e-6, atol=1e-6)
        self.assertAllClose(chunked[1], whole[1], rtol=2e-6, atol=1e-6)
        self.assertAllClose(chunked[2], whole[2], rtol=2e-5, atol=2e-6)
        self.assertGreater(max(float(tf.reduce_max(abs(g))) for g in chunked[2].flatten()), 0.0)


if __name__ == "__main__":
    testing.main()
