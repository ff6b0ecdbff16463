# tests: wings/dropless/exchanges.py, wings/dropless/sorted_rows.py, wings/kernels/exchange.py
"""Tests that exchanges equal one device, what they drop over a bound, and what they send."""

import collections
import math
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.layers.moe import TopKRouter
from lingvo_gshard.layers.moe.exchange import Exchange
from lingvo_gshard.layers.moe.experts import Experts
from lingvo_gshard.sharding import annotate, annotate_weights
from lingvo_gshard.wings.dropless import exchanges
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.dropless.exchanges import default_exchange, exchange_class
from lingvo_gshard.wings.functions.partition import partition
from tests.dropless.example_layers import (
    H,
    M,
    both_ways,
    check_equal,
    make,
    on_devices,
    run_experts,
    weights_of,
)

EXCHANGES = ("gathered", "fixed", "ragged")
K, TOKENS = 2, 8
OVER_BOTH = "activations: B,G->host,data | E->host,data"
# Experts split over one of two axes that split the groups.
HALF = "activations: B,G->data,host | E->host"


def kept_rows(exchange, bound, expert_KGS, num_experts, steps=(), chunks=1):
    """Returns the rows that a bound keeps, with one group of tokens on each device of one group.

    Args:
      exchange: the name of the exchange.
      bound: the bound.
      expert_KGS: the experts of tokens.
      num_experts: size of E.
      steps: with an exchange in two steps, the number of hosts and of devices of each.
      chunks: the number of parts that tokens are exchanged in.
    """
    if chunks > 1:
        parts = np.split(expert_KGS, chunks, 2)
        kept = [kept_rows(exchange, bound, part, num_experts, steps) for part in parts]
        return np.concatenate(kept, 2)
    choices, devices, size = expert_KGS.shape
    local = num_experts // devices
    kept, sent = np.zeros(expert_KGS.shape, bool), choices * size
    in_order = np.ones(expert_KGS.shape, bool)
    if exchange == "fixed" and steps:
        hosts = steps[0]
        room = math.ceil(bound * size * (1 - (1 - 1 / hosts) ** choices) - 1e-9)
        for g, host in np.ndindex(devices, hosts):
            is_there_KS = expert_KGS[:, g] // (num_experts // hosts) == host
            in_order[:, g] &= ~is_there_KS | (np.cumsum(is_there_KS.any(0)) <= room)
    is_gathered = exchange == "gathered" or steps
    most = math.ceil(bound * (sent if is_gathered else sent / devices) - 1e-9)
    # Axes are gathered one after another, the first one first.
    order = np.arange(devices).reshape(steps).T.ravel() if steps else np.arange(devices)
    rows_of = collections.defaultdict(list)
    for k, place, s in np.ndindex(expert_KGS.shape):
        g = order[place]
        expert = expert_KGS[k, g, s]
        if in_order[k, g, s]:
            sender = None if is_gathered else g
            rows_of[sender, expert // local].append((expert, k, place, s))
    for rows in rows_of.values():
        for _, k, place, s in sorted(rows)[:most]:
            kept[k, order[place], s] = True
    return kept


class ExchangesTest(testing.TestCase, parameterized.TestCase):
    def check_mesh(self, mesh, strategy, **values):
        """Compares output and gradients of a layer on a mesh with one device."""
        layer = make(experts=8, experts__use_bias=True, experts__activation="swiglu", **values)
        theta = weights_of(layer)
        x = np.random.default_rng(1).normal(size=(8, TOKENS, M)).astype(np.float32)
        found = on_devices(layer, mesh, strategy)(theta, x)
        check_equal(found, both_ways(layer, theta, x, tf.ones(x.shape[:2], tf.int32)))
        return found

    @parameterized.parameters("gathered", "ragged")
    def test_equals_one_device(self, exchange):
        self.check_mesh("data=8", "expert", dispatch__exchange=exchange)

    def test_whole_updates_of_tpus_equal_one_device(self):
        with mock.patch.object(exchanges, "platform_in_use", lambda: "tpu"):
            self.check_mesh("data=4", "expert", dispatch__exchange="ragged", dispatch__bound=2)

    @parameterized.product(
        exchange=EXCHANGES,
        placed=(
            ("data=4,model=2", "expert_tensor"),
            ("data=2,fsdp=4", "expert_fsdp"),
            ("data=2,fsdp=2,model=2", "expert_fsdp_tensor"),
            ("data=4,model=2", "folded_tensor"),
            ("data=2,host=4", HALF),
        ),
    )
    @pytest.mark.slow
    def test_equals_one_device_under_other_strategies(self, exchange, placed):
        self.check_mesh(*placed, dispatch__exchange=exchange)

    @parameterized.parameters(*EXCHANGES)
    @pytest.mark.slow
    def test_experts_and_groups_that_do_not_divide_evenly(self, exchange):
        layer = make(experts=5, dispatch__exchange=exchange)
        theta = weights_of(layer)
        x = np.random.default_rng(1).normal(size=(6, TOKENS, M)).astype(np.float32)
        found = on_devices(layer, "data=4", "expert")(theta, x)
        check_equal(found, both_ways(layer, theta, x, tf.ones(x.shape[:2], tf.int32)))

    @parameterized.parameters(*EXCHANGES)
    @pytest.mark.slow
    def test_a_bound_that_no_device_reaches_drops_nothing(self, exchange):
        found = self.check_mesh(
            "data=8", "expert", dispatch__exchange=exchange, dispatch__bound=8.0
        )
        self.assertEqual(float(found.metrics["moe/over_bound_share"]), 0)

    def check_bound(self, exchange, bound, steps=(), chunks=1):
        """Compares output and gradients with one device, whose choices lack what NumPy drops."""
        devices, experts = 4, 8
        rng = np.random.default_rng(2)
        shape = (K, devices, TOKENS)
        # The second half of the experts has few rows.
        expert_KGS = np.minimum(rng.integers(0, experts, shape), rng.integers(0, experts, shape))
        gate_KGS = rng.random(shape).astype(np.float32)
        x_GSM = rng.normal(size=(*shape[1:], M)).astype(np.float32)
        kept_KGS = kept_rows(exchange, bound, expert_KGS, experts, steps, chunks)
        options = {"hierarchical": bool(steps), "chunks": chunks}
        self.assertBetween(kept_KGS.mean(), 0.3, 0.95)
        layer = Experts.params().set(model_dim=M, hidden_dim=H, num_experts=experts)
        layer = layer.instantiate(path="moe.experts")
        theta = layer.init(1)
        specs = layer.variable_specs()

        def run(dispatch, kept_KGS, theta, x_GSM, gate_KGS):
            sources = [x_GSM, gate_KGS, *theta.flatten()]
            with tf.GradientTape() as tape, context.scope(training=True, seed=None) as scope:
                tape.watch(sources)
                gates = tf.unstack(gate_KGS)
                y = run_experts(
                    dispatch, layer, theta, x_GSM, expert_KGS, gates, kept_KGS, **options
                )
                loss = tf.reduce_sum(
                    y * np.cos(np.arange(x_GSM.shape.num_elements())).reshape(x_GSM.shape)
                )
            return [y, *tape.gradient(loss, sources)], [v for v, _ in scope.metrics.values()]

        def on_mesh(theta, x_GSM, gate_KGS):
            dispatch = DroplessDispatch.params().set(
                exchange=exchange, bound=bound, over_bound="drop"
            )
            everything = np.ones(shape, bool)
            theta, x_GSM = annotate_weights(theta, specs), annotate(x_GSM, "GSM")
            return run(dispatch, everything, theta, x_GSM, gate_KGS)

        arrays = theta, tf.constant(x_GSM), tf.constant(gate_KGS)
        placed = ("host=2,data=2", OVER_BOTH) if steps else (f"data={devices}", "expert")
        found, (over_bound,) = partition(on_mesh, *placed)(*arrays)
        expected, _ = run(DroplessDispatch.params(), kept_KGS, *arrays)
        for one, other in zip(found, expected, strict=True):
            self.assertAllClose(one, other, rtol=0, atol=3e-6 * np.abs(other).max())
        self.assertAllClose(over_bound, 1 - kept_KGS.mean())

    @parameterized.parameters(("gathered", 1.0), ("fixed", 1.0))
    def test_rows_over_a_bound_are_dropped_and_counted(self, exchange, bound):
        self.check_bound(exchange, bound)

    @parameterized.parameters(
        ("gathered", 0.5),
        ("gathered", 1.3),
        ("ragged", 1.0),
        ("gathered", 1.0, (2, 2), 2),
        ("fixed", 1.0, (2, 2)),
        ("fixed", 0.7, (2, 2), 2),
        ("fixed", 1.0, (), 2),
    )
    @pytest.mark.slow
    def test_rows_over_other_bounds_are_dropped_and_counted(self, exchange, bound, *options):
        self.check_bound(exchange, bound, *options)

    @parameterized.parameters(
        ("tpu", 64, 2, 0.0, "ragged"),
        ("tpu_interpreted", 4, 2, 1.25, "ragged"),
        ("", 8, 2, 0.0, "fixed"),
        ("cuda", 8, 1, 1.25, "gathered"),
        ("cuda_interpreted", 16, 4, 1.25, "gathered"),
        ("cuda", 32, 8, 1.25, "gathered"),
        ("cuda", 16, 2, 1.25, "fixed"),
        ("cuda", 64, 8, 1.25, "fixed"),
        ("cuda", 64, 8, 2.0, "gathered"),
        ("cuda", 32, 4, 2.0, "gathered"),
        ("cuda", 64, 4, 2.0, "fixed"),
        ("cuda", 128, 8, 2.0, "fixed"),
        ("cuda", 64, 8, 0.0, "gathered"),
    )
    def test_the_default_depends_on_the_devices(self, platform, devices, choices, bound, expected):
        self.assertEqual(default_exchange(platform, devices, choices, bound), expected)

    def test_gpus_exchange_ragged_rows_in_groups_of_at_most_32(self):
        options = Exchange.params()
        chosen = [
            exchange_class("ragged", platform, devices, 2, 0.0, options, "moe.dispatch.exchange")
            for platform, devices in (("cuda", 32), ("tpu", 64), ("", 64))
        ]
        self.assertLen(set(chosen), 1)
        message = "moe.dispatch.exchange='ragged' .* 64 GPUs.*47283.*'gathered'.*'fixed'"
        with self.assertRaisesRegex(ValueError, message):
            exchange_class("ragged", "cuda", 64, 2, 0.0, options, "moe.dispatch.exchange")

    def test_rejects_unknown_exchanges(self):
        with self.assertRaisesRegex(ValueError, "moe.dispatch.exchange: 'gather'.*'gathered'"):
            make(dispatch__exchange="gather")

    def test_gathered_tokens_travel_once_for_all_choices(self):
        """Sends tokens, not a row for each choice; XLA for CPUs scatters sums by an all-reduce."""
        layer = make(experts=8, dispatch__exchange="gathered", dispatch__bound=1.5)
        shapes = layer.variable_specs().transform(lambda s: tf.TensorSpec(s.shape, s.dtype))
        step = on_devices(layer, "data=8", "expert")
        calls = step.compile(shapes, tf.TensorSpec((8, TOKENS, M))).collectives()
        self.assertEqual({call.kind for call in calls}, {"all-gather", "all-reduce"})
        gathered = [call.bytes for call in calls if call.kind == "all-gather"]
        # Float32 tokens, the gradients of their sums, and expert and gate of each choice.
        rows, choices = 8 * TOKENS * M * 4, 8 * TOKENS * K * 4
        self.assertCountEqual(gathered, [rows, rows, choices, choices])

    def calls(self, mesh, strategy, **options):
        """Returns the collectives of a layer, forward and backward."""
        layer = make(experts=8, **options)
        shapes = layer.variable_specs().transform(lambda s: tf.TensorSpec(s.shape, s.dtype))
        step = on_devices(layer, mesh, strategy)
        return step.compile(shapes, tf.TensorSpec((8, TOKENS, M))).collectives()

    @parameterized.parameters("gathered", "fixed")
    def test_two_steps_send_fewer_bytes_between_hosts(self, exchange):
        options = {
            "router": TopKRouter.params().set(k=4),
            "dispatch__exchange": exchange,
            "dispatch__bound": 1.0,
            "dispatch__over_bound": "drop",
        }

        def between_hosts(is_hierarchical):
            options["exchange__hierarchical"] = is_hierarchical
            calls = self.calls("host=2,data=4", OVER_BOTH, **options)
            # Less is no rows of tokens, but loads or what the router adds up.
            return {
                kind: sum(
                    call.bytes
                    for call in calls
                    if call.kind == kind and "host" in call.axes and call.bytes > 128
                )
                for kind in ("all-gather", "all-to-all", "all-reduce")
            }

        one, two = between_hosts(False), between_hosts(True)
        rows, choices = TOKENS * M * 4, TOKENS * 4 * 4
        if exchange == "gathered":
            # Tokens, gradients of their sums, experts and gates.
            self.assertEqual(one["all-gather"], 8 * (2 * rows + 2 * choices))
            self.assertEqual(two["all-gather"], one["all-gather"] // 4)
            self.assertLess(two["all-reduce"], one["all-reduce"] / 3)
        else:
            # Rows for 4 experts of a token, there and back, forward and backward. In two steps, a
            # token for each of two hosts, its experts, its gates, and their gradients.
            self.assertEqual(one["all-to-all"], 4 * 4 * rows)
            self.assertEqual(two["all-to-all"], 2 * (4 * rows + 3 * choices))

    def test_parts_are_sent_one_by_one(self):
        """Sends the same bytes in twice as many calls."""
        calls = {
            chunks: [
                call.bytes
                for call in self.calls(
                    "data=8",
                    "expert",
                    dispatch__exchange="gathered",
                    dispatch__bound=0.0,
                    exchange__chunks=chunks,
                )
                if call.kind == "all-gather"
            ]
            for chunks in (1, 2)
        }
        rows = 8 * TOKENS * M * 4
        self.assertEqual(calls[1].count(rows), 2)
        self.assertEqual(calls[2].count(rows // 2), 4)

    @parameterized.product(exchange=("fixed", "ragged"), precision=("fp8", "int8", "bfloat16"))
    @pytest.mark.slow
    def test_rows_have_the_precision_of_the_exchange(self, exchange, precision):
        """Rows and what comes back are rounded on one device as well."""
        values = {"dispatch__exchange": exchange, "exchange__precision": precision}
        found = self.check_mesh("data=8", "expert", **values)
        exact = self.check_mesh("data=8", "expert", dispatch__exchange=exchange)
        self.assertGreater(np.abs(found.output - exact.output).max(), 1e-5)

    @parameterized.parameters(("fp8", "uint8"), ("int8", "int8"))
    def test_gathered_tokens_have_the_precision_of_the_exchange(self, precision, dtype):
        """Rows are rounded on one device as well; tokens and gradients of sums are sent so."""
        values = {"dispatch__exchange": "gathered", "exchange__precision": precision}
        layer, exact = make(experts=8, **values), make(experts=8)
        theta = weights_of(layer)
        x = np.random.default_rng(1).normal(size=(8, TOKENS, M)).astype(np.float32)
        step = on_devices(layer, "data=8", "expert")
        mask = tf.ones(x.shape[:2], tf.int32)
        one = both_ways(layer, theta, x, mask)
        check_equal(step(theta, x), one)
        difference = np.abs(one.output - both_ways(exact, theta, x, mask).output).max()
        self.assertGreater(difference, 1e-4)
        shapes = theta.transform(lambda w: tf.TensorSpec(w.shape, w.dtype))
        calls = step.compile(shapes, tf.TensorSpec(x.shape)).collectives()
        sent = [(call.kind, call.bytes) for call in calls if call.dtype == dtype]
        self.assertEqual(sent, [("all-gather", x.size)] * 2)

    @parameterized.parameters(
        ("", "precision", "fp8", "'gathered' or 'fixed' or 'ragged'"),
        ("ragged", "hierarchical", True, "'gathered' or 'fixed'"),
    )
    def test_options_need_an_exchange_by_name(self, exchange, option, value, expected):
        message = f"moe.exchange.{option}={value!r} .*moe.dispatch.exchange is .*{expected}"
        with self.assertRaisesRegex(ValueError, message):
            make(dispatch__exchange=exchange, **{f"exchange__{option}": value})


if __name__ == "__main__":
    testing.main()
