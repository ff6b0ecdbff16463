# tests: layers/, testing/layers.py, testing/passes.py
"""Every layer of the registry is a LayerTest: a quick class, and a slow one with all runs."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.testing import layers, passes
from lingvo_gshard.testing.layers import assert_close
from lingvo_gshard.testing.passes import Case
from tests.layers import conformance_cases
from tests.training.optim.decayed import check_decay

# Splits all letters that any other strategy splits.
HYBRID = ("expert_fsdp_tensor", "data=2,fsdp=2,model=2")
# Cases that differ from MoE.paper in the router only. Routers work on groups of tokens, each on one
# device: what is split is the same.
SAME_PARTS_AS_PAPER = (
    "MoE.lingvo",
    "MoE.overflow",
    "MoE.switch",
    "MoE.top_k",
    "MoE.forced_balance",
    "MoE.sinkhorn",
)


class _Conformance(testing.LayerTest):
    """What holds for the library's own layers besides."""

    # "jit" traces what "function" traces, and training all but a few constants of evaluation.
    RUNS = (("jit", True),)
    STRATEGIES = (HYBRID,)

    def test_biases_and_scales_do_not_decay(self):
        check_decay(self.case.build().variable_specs())


def _class_of(case: Case, name: str, **attributes: object) -> type:
    """Returns the tests of a case. One process runs them, so that it is compiled once."""
    marks = [pytest.mark.xdist_group(case.name), *attributes.pop("marks", ())]
    values = {
        "PARAMS": case.params,
        "DRAWS": case.draws,
        "PACKS": case.packs,
        "case": functools.cached_property(lambda self: case),
        "pytestmark": marks,
        "__module__": __name__,
        **attributes,
    }
    found = type(name, (_Conformance,), values)
    found.case.__set_name__(found, "case")
    return found


def _make_classes() -> None:
    for case in conformance_cases.CASES:
        name = case.name.replace(".", "_").title().replace("_", "")
        slow = [pytest.mark.slow]
        is_slow = case.name in conformance_cases.SLOW
        attributes = {"STRATEGIES": ()} if case.name in SAME_PARTS_AS_PAPER else {}
        marks = slow if is_slow else []
        globals()[f"{name}Test"] = _class_of(case, f"{name}Test", marks=marks, **attributes)
        globals()[f"{name}EverywhereTest"] = _class_of(
            case,
            f"{name}EverywhereTest",
            marks=slow,
            RUNS=testing.LayerTest.RUNS,
            STRATEGIES=layers.STRATEGIES,
        )


_make_classes()


class LowPrecisionTest(testing.TestCase):
    """A task computes activations, or keeps weights, in bfloat16."""

    def check(self, option):
        (case,) = [c for c in conformance_cases.CASES if c.name == "TranslationTask.loss"]
        theta, inputs = passes.make_theta(case.build()), passes.make_inputs().transform(tf.constant)
        task = case.params.copy().set(**{option: "bfloat16"}).instantiate(path="layer")
        specs = task.variable_specs().flatten()
        self.assertEqual({s.dtype for s in specs}, {"bfloat16" if option == "dtype" else "float32"})
        rounded = task.variable_specs().pack(
            tf.cast(w, s.dtype) for w, s in zip(theta.flatten(), specs, strict=True)
        )
        seen = {}
        with context.scope(training=False, on_output=seen.__setitem__):
            loss = task.loss(rounded, inputs)[0]
        made = {output.dtype.name for path, output in seen.items() if "/" not in path}
        self.assertEqual(made, {"bfloat16" if option == "fprop_dtype" else "float32"})
        self.assertEqual(loss.dtype, tf.float32)
        expected = passes.pass_of(case, False)(theta, inputs, tf.constant(np.array([5, 0], "i4")))
        assert_close(loss, expected.output, "bfloat16")

    def test_weights(self):
        self.check("dtype")

    def test_activations(self):
        self.check("fprop_dtype")


if __name__ == "__main__":
    testing.main()
