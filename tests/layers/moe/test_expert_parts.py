# tests: layers/moe/experts.py, layers/moe/layer.py
"""Checks experts that are split by hidden dimension: devices compute parts of their outputs."""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.layers.moe.experts import Experts
from lingvo_gshard.sharding import annotate, annotate_weights
from lingvo_gshard.sharding.partitioning import Partitioning, use_partitioning
from lingvo_gshard.wings.fine_tuning.adapters import CHILD, Adapters
from lingvo_gshard.wings.functions.partition import partition
from lingvo_gshard.wings.published_layers.routers import ExpertChoiceRouter
from tests.layers.moe.dispatch_names import dispatch_params

B, L, M, H, E = 8, 16, 16, 32, 8
LAYOUT = ("data=4,model=2", "expert_tensor")
HOSTS = ("host=2,data=2,model=2", "activations: B,G->host,data | E->host,data; H->model")


def layer(**values) -> MixtureOfExperts:
    params = MixtureOfExperts.params().set(model_dim=M, hidden_dim=H, num_experts=E, group_size=L)
    for path, value in values.items():
        params.set_path(path.replace("__", "."), value)
    return params.instantiate(path="moe")


def outputs_and_gradients(moe: MixtureOfExperts):
    """Returns a function of weights, rows and an output gradient, for a training pass."""
    specs = moe.variable_specs()

    def run(theta, x_BLM, d_y):
        theta, x_BLM = annotate_weights(theta, specs), annotate(x_BLM, "BLM")
        with (
            context.scope(training=True, seed=tf.constant([3, 4], tf.int32)),
            tf.GradientTape() as tape,
        ):
            tape.watch((theta, x_BLM))
            y = annotate(moe.fprop(theta, x_BLM, tf.ones([B, L], tf.int32)), "BLM")
        d_theta, d_x = tape.gradient(y, (theta, x_BLM), annotate(d_y, "BLM"))
        return y, annotate_weights(d_theta, specs), annotate(d_x, "BLM")

    rng = np.random.default_rng(1)
    theta = specs.transform(lambda spec: rng.normal(0.0, 0.3, spec.shape).astype(np.float32))
    rows = [rng.standard_normal((B, L, M)).astype(np.float32) for _ in range(2)]
    return run, (theta, *rows)


CASES = {
    "gather": ({}, LAYOUT),
    "einsum": ({"dispatch": dispatch_params("einsum")}, LAYOUT),
    "expert choice": ({"router": ExpertChoiceRouter.params()}, LAYOUT),
    "everything": (
        {
            "experts__use_bias": True,
            "experts__activation": "swiglu",
            "experts__dropout_rate": 0.2,
            "exchange__chunks": 2,
            "shared_hidden_dim": 24,
        },
        LAYOUT,
    ),
    "hierarchical": ({"exchange__hierarchical": True, "experts__use_bias": True}, HOSTS),
    "rounded": ({"exchange__precision": "bfloat16"}, LAYOUT),
    "fsdp": ({}, ("data=2,fsdp=2,model=2", "expert_fsdp_tensor")),
}


def parts(strategy: str, hidden: int = H, mesh: str = "data=4,model=2") -> int:
    experts = Experts.params().set(model_dim=M, hidden_dim=hidden, num_experts=E)
    return _parts(experts.instantiate(path="experts"), mesh, strategy)


def _parts(experts: Experts, mesh: str, strategy: str) -> int:
    found = []

    @tf.function(autograph=False)
    def traced():
        with use_partitioning(Partitioning.make(mesh, strategy)):
            found.append(experts.parts)

    traced.get_concrete_function()
    return found[0]


class ExpertPartsTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters("gather", "hierarchical", "fsdp")
    def test_outputs_and_gradients_are_those_of_one_device(self, case):
        self.check(case)

    @parameterized.parameters(*sorted({*CASES} - {"gather", "hierarchical", "fsdp"}))
    @pytest.mark.slow
    def test_outputs_and_gradients_of_other_layers_are_those_of_one_device(self, case):
        self.check(case)

    def check(self, case):
        values, layout = CASES[case]
        run, arguments = outputs_and_gradients(layer(**values))
        expected = tf.nest.flatten(partition(run, "data=1")(*arguments))
        partitioned = partition(run, *layout)
        found = tf.nest.flatten(partitioned(*arguments))
        # A number next to the middle of two bfloat16 numbers may be rounded to either.
        tolerance = 2e-2 if case == "rounded" else 2e-4
        for one, other in zip(found, expected, strict=True):
            self.assertAllClose(one, other, rtol=tolerance, atol=tolerance)
        calls = partitioned.compile(*arguments).collectives()
        summed = sum(call.bytes for call in calls if call.axes == ("model",))
        if case in ("gather", "fsdp"):
            # Tokens forward and backward, and the gradients of both gates.
            self.assertEqual(summed, 4 * (B * L // 4) * (2 * M + 2))

    @parameterized.parameters(
        ("expert_tensor", 2),
        ("tensor", 2),
        ("expert", 1),
        ("E->data; H->data,model", 2),
        ("E->data; H->data", 1),
        ("activations: G,H->model", 1),
        ("activations: H,M->model", 1),
        ("activations: H->model; M->data", 1),
        ("E->data; H->model; U->none", 1),
    )
    def test_parts_are_those_of_the_hidden_dimension_unless_other_dimensions_have_its_devices(
        self, strategy, wanted
    ):
        self.assertEqual(parts(strategy), wanted)

    def test_uneven_parts_and_adapters_are_summed_before_they_are_combined(self):
        self.assertEqual(parts("expert_tensor", hidden=33), 1)
        experts = Experts.params().set(model_dim=M, hidden_dim=H, num_experts=E)
        experts = experts.instantiate(path="experts")
        experts.create_child(CHILD, Adapters.params().set(rank=2))
        self.assertEqual(_parts(experts, *LAYOUT), 1)


if __name__ == "__main__":
    testing.main()
