# tests: wings/long_inputs/chunked_loss.py
"""A loss in chunks on many devices: values, gradients, collectives, and what is in memory."""

import functools
import math
import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.layers.embedding import Softmax, TokenEmbedding
from lingvo_gshard.layers.losses import Objective, cross_entropy
from lingvo_gshard.sharding import annotate, annotate_weights
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.functions.partition import partition
from lingvo_gshard.wings.long_inputs.chunked_loss import chunked_cross_entropy

B, L, M, V = 8, 16, 32, 128
POSITIONS = 4
LAYOUTS = (
    ("data=8", "data"),
    ("data=8", "fsdp"),
    ("model=8", "tensor"),
    ("data=2,model=4", "fsdp_tensor"),
)
CAP, SMOOTHING, Z_LOSS = 5.0, 0.1, 0.01


def softmax(is_tied=False, vocabulary_size=V):
    params = TokenEmbedding.params() if is_tied else Softmax.params()
    params.set(model_dim=M, vocabulary_size=vocabulary_size)
    return params.instantiate(path="softmax")


def arguments_of(layer, rows=B, length=L):
    numbers = np.random.default_rng(1)
    x = numbers.normal(size=(rows, length, M)).astype(np.float32)
    labels = numbers.integers(0, layer.p.vocabulary_size, (rows, length)).astype(np.int32)
    segments = numbers.integers(0, 3, (rows, length)).astype(np.int32)
    return layer.init(1).transform(np.asarray), x, labels, segments


def step(layer, positions):
    """Returns a function of the loss and its gradients. Without positions it has all logits."""
    specs = layer.variable_specs()

    def run(theta, x_BLM, labels_BL, segments_BL):
        theta, x_BLM = annotate_weights(theta, specs), annotate(x_BLM, "BLM")
        labels_BL, segments_BL = (annotate(x, "BL") for x in (labels_BL, segments_BL))
        with context.scope(training=True, seed=tf.zeros([2], tf.int32)), tf.GradientTape() as tape:
            tape.watch((theta, x_BLM))
            if positions:
                objective = Objective(labels_BL, segments_BL, SMOOTHING, Z_LOSS, CAP)
                loss_in_chunks = functools.partial(chunked_cross_entropy, positions=positions)
                sums = layer.cross_entropy(theta, x_BLM, objective, loss_in_chunks)
            else:
                is_tied = isinstance(layer, TokenEmbedding)
                logits_BLV = layer.logits(theta, x_BLM) if is_tied else layer.fprop(theta, x_BLM)
                logits_BLV = CAP * tf.tanh(logits_BLV / CAP)
                sums = cross_entropy(logits_BLV, labels_BL, segments_BL, SMOOTHING, Z_LOSS)
            loss = sums.smoothed / sums.tokens
        found: Any = tape.gradient(loss, (theta, x_BLM))
        d_theta, d_x = found
        d_theta = annotate_weights(d_theta, specs)
        return loss, sums.exact, sums.correct, d_theta, annotate(d_x, "BLM")

    return run


def compiled(mesh, strategy, positions, length=L, partitioner="gspmd"):
    layer = softmax()
    run = partition(step(layer, positions), mesh, strategy, partitioner=partitioner)
    return run.compile(*arguments_of(layer, length=length))


class ChunkedLossTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("data=8", "data", {}),
        ("data=8", "fsdp", {"is_tied": True}),
        ("model=8", "tensor", {}),
        ("data=2,model=4", "fsdp_tensor", {"is_tied": True}),
        ("data=2,model=4", "data_tensor_sequence", {}),
        ("data=2,context=2,model=2", "data_context_tensor", {}),
        ("data=8", "data", {"rows": 5, "length": 7}),
        ("data=2,context=4", "data_context", {"rows": 3, "length": 9}),
        ("data=2,model=4", "data_tensor", {"vocabulary_size": 101}),
    )
    def test_devices_compute_what_one_computes(self, mesh, strategy, options):
        sizes = {name: options[name] for name in ("rows", "length") if name in options}
        model = {name: value for name, value in options.items() if name not in sizes}
        layer = softmax(**model)
        arguments = arguments_of(layer, **sizes)
        constants: Any = tf.nest.map_structure(tf.constant, arguments)
        theta, x, labels, segments = constants
        expected = step(layer, 0)(theta, x, labels, segments)
        found = partition(step(layer, POSITIONS), mesh, strategy)(*arguments)
        self.assertAllClose(tuple(found), tuple(expected), rtol=1e-5, atol=1e-6)

    @parameterized.parameters(*LAYOUTS)
    def test_collectives_are_those_of_all_logits(self, *layout):
        self.check_collectives(layout, "gspmd")

    @parameterized.parameters(*LAYOUTS)
    @pytest.mark.slow
    def test_collectives_of_shardy_are_those_of_all_logits(self, *layout):
        self.check_collectives(layout, "shardy")

    def check_collectives(self, layout, partitioner):
        """Weights are gathered and gradients summed once, and of V only a few numbers a position.

        The loop exchanges maxima and sums over V for each chunk, as many bytes in total.
        """
        mesh, strategy = layout
        whole, chunked = (
            compiled(mesh, strategy, positions, partitioner=partitioner).collectives()
            for positions in (0, POSITIONS)
        )
        self.assertEqual(hlo.count_by_kind(chunked), hlo.count_by_kind(whole))
        self.assertEqual(
            sorted((c.kind, c.times * c.bytes) for c in chunked),
            sorted((c.kind, c.times * c.bytes) for c in whole),
        )
        in_loop = [c for c in chunked if c.times > 1]
        has_parts_of_v = "model" in mesh
        self.assertEqual(bool(in_loop), has_parts_of_v)
        self.assertLessEqual(max((c.bytes for c in in_loop), default=0), 3 * 4 * POSITIONS)

    def test_sequence_parallelism_gathers_activations_once(self):
        calls = compiled("data=2,model=4", "data_tensor_sequence", POSITIONS).collectives()
        activations = B // 2 * L * M * 4
        large = [(c.kind, c.times, c.bytes) for c in calls if c.bytes >= activations]
        # On CPU, XLA uses an all-reduce and a slice instead of a reduce-scatter.
        self.assertEqual(
            sorted(large), [("all-gather", 1, activations), ("all-reduce", 1, activations)]
        )

    @parameterized.parameters(
        ("data=8", "fsdp", 1), ("data=4,model=2", "fsdp_tensor", 2), ("data=8", "data", 1)
    )
    def test_no_tensor_has_all_logits(self, mesh, strategy, parts_of_v):
        """The largest tensors of the program are stacks of x, which are smaller than logits."""
        length, rows = 512, B * parts_of_v // 8
        positions = rows * length
        logits = positions * V // parts_of_v
        for wanted, has_logits in ((positions // 8, False), (0, True)):
            text = compiled(mesh, strategy, wanted, length).hlo_text()
            shapes = re.findall(r"\w+\[([\d,]+)\]", text)
            sizes = [math.prod(map(int, shape.split(","))) for shape in shapes]
            self.assertEqual(max(sizes) >= logits, has_logits)


if __name__ == "__main__":
    testing.main()
