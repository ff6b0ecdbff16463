# tests: wings/dropless/exchanges.py, wings/dropless/dispatch.py, layers/moe/exchange.py
"""Tests that every exchange equals one device under strategies, options and loads drawn at random.

A token with NaN is among the tokens: no other token may be changed by it.
"""

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.layers.moe import TopKRouter
from tests.dropless.example_layers import M, both_ways, make, on_devices, weights_of

MESHES = ("data=8", "host=2,data=4", "host=4,data=2", "host=2,data=2,model=2")
DRAWS, FAST = 20, 3


def draw(seed):
    """Returns a mesh, a strategy and options of a layer; and the generator for the rest."""
    rng = np.random.default_rng(seed)
    mesh = MESHES[seed % len(MESHES)]
    names = [axis.partition("=")[0] for axis in mesh.split(",")]
    groups = [*rng.permutation(names)][: rng.integers(1, len(names) + 1)]
    experts = [axis for axis in rng.permutation(names) if rng.random() < 0.7] or names[:1]
    hidden = [axis for axis in names if axis not in experts]
    everything = f"E->{','.join(experts)}" + (f"; H->{hidden[0]}" if hidden else "")
    exchange = ("gathered", "fixed", "ragged")[seed % 3]
    shared = [axis for axis in experts if axis in groups]
    options = {
        "experts": int(rng.choice([5, 8, 16])),
        "router": TopKRouter.params().set(k=int(rng.integers(1, 4)), normalize=False),
        "experts__activation": str(rng.choice(["swiglu", "relu"])),
        "experts__use_bias": bool(rng.random() < 0.5),
        "dispatch__exchange": exchange,
        # Rows over a bound are computed in further rounds.
        "dispatch__bound": float(rng.choice([0.0, 0.5, 1.0, 8.0])),
        "exchange__chunks": int(rng.integers(1, 4)),
        "exchange__hierarchical": exchange != "ragged" and len(shared) > 1,
    }
    if exchange == "gathered":
        options["exchange__precision"] = str(rng.choice(["", "fp8", "int8"]))
    return mesh, f"activations: B,G->{','.join(groups)} | {everything}", options, rng


class RandomExchangesTest(testing.TestCase, parameterized.TestCase):
    def check(self, seed):
        mesh, strategy, options, rng = draw(seed)
        layer = make(**options)
        theta = weights_of(layer)
        # Few experts get most tokens.
        theta.router.w_gate = theta.router.w_gate * float(rng.choice([1.0, 10.0]))
        x = rng.normal(size=(8, 8, M)).astype(np.float32)
        on_mesh, mask = on_devices(layer, mesh, strategy), tf.ones(x.shape[:2], tf.int32)
        one, many = both_ways(layer, theta, x, mask), on_mesh(theta, x)
        for name in ("output", "gradients"):
            pairs = zip(tf.nest.flatten(many[name]), tf.nest.flatten(one[name]), strict=True)
            for found, expected in pairs:
                self.assertAllClose(found, expected, rtol=0, atol=3e-6 * np.abs(expected).max())
        x[3, 5] = np.nan
        one, many = both_ways(layer, theta, x, mask).output, on_mesh(theta, x).output
        self.assertEqual(np.isnan(one).any(-1).sum(), 1)
        self.assertAllClose(many, one, rtol=0, atol=3e-6 * np.nanmax(np.abs(one)))

    @parameterized.parameters(*range(FAST))
    def test_equals_one_device(self, seed):
        self.check(seed)

    @parameterized.parameters(*range(FAST, DRAWS))
    @pytest.mark.slow
    def test_equals_one_device_under_more_strategies(self, seed):
        self.check(seed)


if __name__ == "__main__":
    testing.main()
