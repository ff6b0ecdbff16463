"""LayerTest and RouterTest: what the library holds every layer and router to."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import tempfile
import unittest
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

from lingvo_gshard.core import (
    Experiment,
    NestedMap,
    Params,
    UserError,
    context,
    initializers,
    letters,
    params_text,
)
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.layers import MixtureOfExperts, inherit
from lingvo_gshard.tasks import LanguageModelTask
from lingvo_gshard.testing import passes
from lingvo_gshard.testing.passes import Case, E, H, M, N, V
from lingvo_gshard.testing.test_case import TestCase
from lingvo_gshard.training import CheckpointStore, arrays
from lingvo_gshard.wings.inference.decoding.models import model_facts
from lingvo_gshard.wings.inference.engine.shapes import EngineOptions
from lingvo_gshard.wings.inference.loading import make_engine
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.requests import Request
from lingvo_gshard.wings.verification.function import verify_function

_BOS, _EOS, _V, _TOKENS = 1, 2, 11, 5
_BEGINNINGS = ((_BOS, 5, 7, 4), (_BOS,))


def greedy_texts(feed_forward: Params) -> Iterator[tuple[str, list[int], list[int]]]:
    """Yields, for some beginnings, what the engine decodes and what a whole pass chooses.

    Args:
      feed_forward: the layer in each of two layers of a decoder.

    Yields:
      The beginning in words, the tokens of the engine, and the tokens with the largest logits
      after each beginning of the text, in a pass over it. Texts have an end if there is room.
    """
    params = LanguageModelTask.params().set(vocabulary_size=_V, model_dim=feed_forward.model_dim)
    params.decoder.set(num_layers=2, num_heads=2, hidden_dim=16, moe_every=0)
    params.decoder.layer.feed_forward = feed_forward
    task = params.instantiate()
    theta = passes.with_trained(task, 3, lambda weight: weight * 3.0)
    facts = dataclasses.replace(model_facts(task, 32, _BOS, (_EOS,)), most_steps=_TOKENS)
    options = DecodingOptions(beam_size=1, most_tokens=_TOKENS)
    with make_engine(task, theta, facts, options=EngineOptions(workers=1)) as engine:
        for beginning in _BEGINNINGS:
            (found,) = engine.submit(Request((), beginning, options)).result()
            tokens = [*found.tokens, _EOS][:_TOKENS]
            ids = np.array([[*beginning, *tokens[:-1]]], np.int32)
            batch = {
                "target_inputs": tf.constant(ids),
                "target_segments": tf.ones(ids.shape, tf.int32),
                "target_positions": tf.range(ids.shape[1], dtype=tf.int32)[tf.newaxis],
            }
            with context.scope(training=False):
                logits = task.logits(theta, batch)
            chosen = np.argmax(logits[0, len(beginning) - 1 :], -1)
            yield f"after {list(beginning)}", tokens, chosen.tolist()


# Largest allowed error relative to the largest expected magnitude.
TOLERANCES = {
    # The same float32 operations, in another order or fused.
    "order": 1e-4,
    # float32 against a formula in float64.
    "float32": 1e-5,
    # float32 statistics over a few thousand draws.
    "sampling": 3e-2,
    # bfloat16 activations, of 8 significant bits, against float32. Not all CPUs round alike.
    "bfloat16": 3e-2,
    # A gradient against a central difference of a float32 function.
    "difference": 1e-2,
}


def assert_close(
    actual: Any, expected: Any, separated_by: str, least_scale: float = 1e-3, what: str = ""
) -> None:
    """Asserts that shapes are equal and the largest error is within the named tolerance.

    Args:
      separated_by: a key of TOLERANCES.
      least_scale: lower bound of the scale of `expected`, so that zeros can be compared.
      what: what the message of a failure begins with.
    """
    actual = np.asarray(actual, np.float64)
    expected = np.asarray(expected, np.float64)
    begin = f"{what}: " if what else ""
    assert actual.shape == expected.shape, f"{begin}shape {actual.shape}, not {expected.shape}"
    if not expected.size:
        return
    scale = max(float(np.abs(expected).max()), least_scale)
    error = float(np.abs(actual - expected).max()) / scale
    allowed = TOLERANCES[separated_by]
    assert error <= allowed, f"{begin}error {error:.2e} of {scale:.3g}, allowed {allowed:.0e}"


# Step sizes of the difference quotients. A large step may cross a kink of ReLU or change the
# routing, and a small one suffers from rounding. A wrong gradient fails for all of them.
_STEPS = (1e-2, 3e-3, 1e-3, 3e-4)
_SEED = np.array([5, 0], np.int32)
_SIZES = {"model_dim": M, "hidden_dim": H, "num_heads": N, "num_experts": E, "vocabulary_size": V}

# Strategies and meshes. Most dimensions do not divide evenly, so that parts are padded and some
# parts are empty. zero1 is left out: it splits only optimizer state and equals `data` for a layer.
STRATEGIES = (
    ("data", "data=8"),
    ("expert", "data=8"),
    ("tensor", "model=8"),
    ("fsdp", "data=8"),
    ("expert_tensor", "data=4,model=2"),
    ("folded_tensor", "data=4,model=2"),
    ("data_tensor", "data=2,model=4"),
    ("expert_fsdp_tensor", "data=2,fsdp=2,model=2"),
    ("expert_context_sequence_tensor", "data=2,context=2,model=2"),
)


# If one of them fails, nearly every test fails.
_FIRST = ("test_a_pass_runs", "test_only_random_draws_depend_on_the_seed")
# A layer that reads padding fails them as well: they change what is around a sentence.
_AFTER_PADDING = (
    "test_packing_does_not_change_a_sentence",
    "test_in_a_stack_it_decodes_what_the_whole_model_computes",
)


class LayerTest(TestCase):
    """Tests a layer by the rules for all layers of the library, on small inputs.

    The inputs are two packed rows of six positions, with padding: `inputs.x` [B,L,M] with
    `target_segments` [B,L], `target_inputs` and `target_labels` (ids), `target_positions`, and
    `memory` [B,K,M] with `source_segments`, `source_ids` and `source_positions`.

    Class attributes:
      PARAMS: Params of the layer. Sizes of 0 (model_dim, hidden_dim, num_heads, num_experts,
        vocabulary_size) are filled in.
      DRAWS: whether the layer draws random numbers in training.
      PACKS: whether the output of a sentence does not depend on the sentences packed with it.
      STRATEGIES: pairs (strategy, mesh) that partition the layer.
      RUNS: pairs (runner, training) that are compared with eager execution.
    """

    PARAMS: ClassVar[Params | None] = None
    DRAWS: ClassVar[bool] = False
    PACKS: ClassVar[bool] = True
    STRATEGIES: ClassVar[tuple[tuple[str, str], ...]] = STRATEGIES
    RUNS: ClassVar[tuple[tuple[str, bool], ...]] = (
        ("function", True),
        ("function", False),
        ("jit", True),
        ("jit", False),
    )

    # Weights, compiled passes and results are made once for all tests of a class.
    _made: ClassVar[dict[Any, Any]]

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        cls._made = {}

    @classmethod
    def setUpClass(cls) -> None:
        """Skips classes that are not for one layer."""
        if cls.PARAMS is None:
            raise unittest.SkipTest("PARAMS names the layer to test")
        super().setUpClass()
        cls.addClassCleanup(cls._made.clear)

    def setUp(self) -> None:
        """Skips a test that would fail for the reason that an earlier test gives."""
        super().setUp()
        padding = ["test_padding_has_no_effect"] * (self._testMethodName in _AFTER_PADDING)
        for name in (*_FIRST, *padding):
            if self._testMethodName == name:
                return
            if not self._shared(name, functools.partial(self._passes, name)):
                self.skipTest(f"{name} fails, and says why")

    def _passes(self, name: str) -> bool:
        try:
            getattr(self, name)()
        except Exception:
            return False
        return True

    def _shared(self, key: Any, make: Callable[[], Any]) -> Any:
        """Returns what the first test of the class made under a key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def call(self, layer: Any, theta: NestedMap, inputs: NestedMap) -> tf.Tensor:
        """Returns the layer's output, by default `fprop` of x, and of the mask if it has one."""
        given = (inputs.x, inputs.target_segments)[: _arguments(layer)]
        return layer.fprop(theta, *given)

    @functools.cached_property
    def case(self) -> Case:
        """The layer, with how it is called."""
        assert self.PARAMS is not None
        name = type(self).__name__
        return Case(name, inherit(self.PARAMS, **_SIZES), self.call, self.DRAWS, self.PACKS)

    @property
    def theta(self) -> NestedMap:
        """Random weights."""
        return self._shared("theta", lambda: passes.make_theta(self.case.build()))

    @functools.cached_property
    def inputs(self) -> NestedMap:
        """The inputs as tensors."""
        return passes.make_inputs().transform(tf.constant)

    def run_pass(self, training: bool, runner: str, seed: int = 5) -> NestedMap:
        """Returns output, losses, metrics and gradients of one pass.

        Args:
          runner: "eager", "function" or "jit".
          seed: of the random numbers.
        """
        return self._runner(training, runner)(self.theta, self.inputs, tf.constant([seed, 0]))

    def _runner(self, training: bool, runner: str) -> Callable[..., NestedMap]:
        """Returns the function (theta, inputs, seed) of a pass, which is compiled once."""
        make = lambda: passes.RUNNERS[runner](passes.pass_of(self.case, training))  # noqa: E731
        return self._shared((training, runner), make)

    def _eager_result(self, training: bool) -> NestedMap:
        """Returns the result of `run_pass` in eager execution."""
        return self._shared(("result", training), lambda: self.run_pass(training, "eager"))

    def test_a_pass_runs(self) -> None:
        """The layer is built and computes, forward and backward. Without it no other test runs."""
        for training in (True, False):
            with passes.noted(f"with {training=}"):
                self._eager_result(training)

    def test_compiled_it_computes_what_it_computes_eagerly(self) -> None:
        """tf.function with and without XLA, in training and in evaluation."""
        for runner, training in self.RUNS:
            with passes.noted(f"with {runner=} and {training=}"):
                expected, found = self._eager_result(training), self.run_pass(training, runner)
                tf.nest.assert_same_structure(found, expected)
                pairs = zip(found.flatten_items(), expected.flatten(), strict=True)
                for (path, one), other in pairs:
                    self.assertEqual(one.dtype, other.dtype, path)
                    assert_close(one, other, "order", what=path)

    def test_only_random_draws_depend_on_the_seed(self) -> None:
        """Evaluation draws nothing, and equal seeds give equal bits."""
        for training in (True, False):
            result, again = self._eager_result(training), self.run_pass(training, "eager")
            self.assertTrue(_same_bits(result, again), f"draws without a key, with {training=}")
            is_same = _same_bits(result, self.run_pass(training, "eager", seed=6))
            found = f"another seed gives {'the same' if is_same else 'another'} result"
            message = f"with {training=} and DRAWS = {self.DRAWS}, {found}"
            self.assertEqual(is_same, not (training and self.DRAWS), message)

    def test_evaluation_needs_no_seed(self) -> None:
        """A pass without a seed computes what one with a seed computes."""
        with context.scope(training=False):
            output = self.case.call(self.case.build(), self.theta, self.inputs)
        np.testing.assert_array_equal(output, self._eager_result(False).output)

    def test_gradients_match_difference_quotients(self) -> None:
        """Each weight and each input, along a random direction."""
        function = self._runner(True, "jit")
        sources = NestedMap(theta=self.theta, x=self.inputs.x, memory=self.inputs.memory)
        gradients = function(self.theta, self.inputs, tf.constant(_SEED)).gradients.flatten()
        rng = np.random.default_rng(11)

        def value(index: int, direction: np.ndarray, step: float) -> float:
            leaves = sources.flatten()
            leaves[index] = leaves[index] + (step * direction).astype(np.float32)
            moved = sources.pack(leaves)
            moved_inputs = NestedMap(self.inputs, x=moved.x, memory=moved.memory)
            return passes.objective(function(moved.theta, moved_inputs, tf.constant(_SEED)))

        specs = NestedMap(theta=self.case.build().variable_specs())
        # Their gradients carry the values that were reported to their update rules.
        by_rules = {path for path, spec in specs.flatten_items() if spec.update_rule}
        for index, (path, _) in enumerate(sources.flatten_items()):
            if path not in by_rules:
                gradient = gradients[index].numpy().astype(np.float64)
                norm = np.linalg.norm(gradient)
                drawn = rng.normal(size=gradient.shape)
                direction = drawn / np.linalg.norm(drawn) + gradient / max(norm, 1e-9)
                allowed = TOLERANCES["difference"] * max(norm, 0.05)
                expected, slopes = (gradient * direction).sum(), []
                for h in _STEPS:
                    change = value(index, direction, h) - value(index, direction, -h)
                    slopes.append(change / (2 * h))
                    if abs(slopes[-1] - expected) <= allowed:
                        break
                else:
                    self.fail(f"{path}: slope {expected}, difference quotients {slopes}")

    def test_weights_match_their_specs(self) -> None:
        """Paths, layouts, shapes, types, and equal weights from equal seeds."""
        layer = self.case.build()
        specs, theta, again = layer.variable_specs(), layer.init(3), layer.init(3)
        other = layer.init(4)
        rows = (specs.flatten_items(), theta.flatten_items(), again.flatten(), other.flatten())
        for (path, spec), (theta_path, weight), same, different in zip(*rows, strict=True):
            self.assertEqual((path, f"layer.{path}"), (theta_path, spec.path))
            letters.check_layout(spec.layout, len(spec.shape))
            self.assertEqual((tuple(weight.shape), weight.dtype.name), (spec.shape, spec.dtype))
            self.assertTrue(np.isfinite(weight).all(), path)
            np.testing.assert_array_equal(weight, same)
            self.assertIsInstance(spec.initializer, initializers.Initializer)
            is_constant = spec.initializer.kind == "constant"
            self.assertEqual(np.array_equal(weight, different), is_constant, path)

    def test_params_round_trip_through_text(self) -> None:
        """Params that were written as a run's params.txt are read back."""
        experiment = Experiment.params().set(name=self.case.name, task=self.case.params)
        read = params_text.experiment_from_text(experiment.to_text())
        self.assertEqual(read.diff(experiment), [])
        self.assertEqual(read.task, self.case.params)

    def test_padding_has_no_effect(self) -> None:
        """Other values in padding change no real position, loss or metric."""
        result = self._eager_result(False)
        disturbed = passes.with_other_padding(passes.make_inputs()).transform(tf.constant)
        other = passes.pass_of(self.case, False)(self.theta, disturbed, tf.constant(_SEED))
        real: Any = self.inputs.target_segments.numpy() > 0 if result.output.shape.rank else ...
        mask = "changes with values at padding, where the segments (mask_BL) are 0"
        one, two = result.output.numpy()[real], other.output.numpy()[real]
        np.testing.assert_array_equal(one, two, f"the output at real positions {mask}")
        self.assertTrue(_same_bits(result.losses, other.losses), f"a loss {mask}")
        self.assertTrue(_same_bits(result.metrics, other.metrics), f"a metric {mask}")

    def test_packing_does_not_change_a_sentence(self) -> None:
        """A sentence has the same output alone in its row."""
        if not self.PACKS:
            self.skipTest("PACKS is False")
        output, inputs = self._eager_result(False).output.numpy(), passes.make_inputs()
        packed = passes.sentences(inputs.target_segments)
        alone = passes.unpacked(inputs, packed).transform(tf.constant)
        with context.scope(training=False):
            found = self.case.call(self.case.build(), self.theta, alone).numpy()
        for row, (packed_row, segment) in enumerate(packed):
            expected = output[packed_row, inputs.target_segments[packed_row] == segment]
            assert_close(found[row, : len(expected)], expected, "order")

    def test_partitioned_it_computes_what_one_device_computes(self) -> None:
        """Output, losses and gradients under each of STRATEGIES, in float64."""
        arguments = self.theta.transform(np.asarray), passes.make_inputs(), _SEED
        for strategy, mesh in self.STRATEGIES:
            with passes.noted(f"with {strategy=} and {mesh=}"):
                function = passes.partitioned_pass_of(self.case, training=True)
                found = verify_function(function, arguments, mesh=mesh, strategy=strategy)
                wrong = [row for row in found.compared if not row.is_equal]
                self.assertFalse(wrong, f"first: {found.first}")

    def test_a_checkpoint_restores_it(self) -> None:
        """Weights are read back to the bit."""
        specs = self.case.build().variable_specs()
        if not specs.flatten():
            self.skipTest("the layer has no weights")
        theta = self.theta.transform(lambda weight: weight.numpy())
        with tempfile.TemporaryDirectory() as folder:
            store = CheckpointStore(folder, say=self.fail)
            store.save(1, NestedMap(theta=theta), None, "")
            store.finish()
            checkpoint = store.restore()
            store.close()
        assert checkpoint is not None
        read = arrays.unflatten(specs, checkpoint.arrays.get("theta", {}), "weights")
        for (path, one), other in zip(theta.flatten_items(), read.flatten(), strict=True):
            np.testing.assert_array_equal(one, other, err_msg=path)

    def test_in_a_stack_it_decodes_what_the_whole_model_computes(self) -> None:
        """As the feed-forward layer of a language model: greedy decoding and a full pass agree."""
        if "mask_BL" not in inspect.signature(self.case.build().fprop).parameters:
            self.skipTest("only a layer with fprop(theta, x_BLM, mask_BL) fits in a stack")
        if not self.case.packs:
            self.skipTest("a token's output depends on other tokens")
        try:
            texts = list(greedy_texts(self.case.params))
        except UserError as error:
            self.skipTest(f"refused: {error}")
        for what, tokens, expected in texts:
            self.assertEqual(tokens, expected, what)


class RouterTest(LayerTest):
    """Tests a router in a mixture of experts, by the rules for all routers of the library.

    Class attributes:
      PARAMS: Params of the router.
    """

    @functools.cached_property
    def case(self) -> Case:
        """A mixture of experts with the router, whose experts have room for all tokens."""
        assert self.PARAMS is not None
        router = self.PARAMS.copy()
        if "evaluation_capacity_factor" in router and not router.evaluation_capacity_factor:
            router.evaluation_capacity_factor = float(E)
        params = MixtureOfExperts.params().set(
            model_dim=M, hidden_dim=H, num_experts=E, group_size=5, router=router
        )
        return Case(type(self).__name__, params, self.call, self.DRAWS, self.PACKS)

    def test_a_causal_layer_takes_it_or_says_why_not(self) -> None:
        """The choice of a token depends on later tokens only if the router says so."""
        params = self.case.params.copy().set(is_causal=True)
        try:
            layer = params.instantiate(path="layer")
        except ValueError as error:
            self.assertIn("is_causal", str(error))
            return
        inputs = passes.make_inputs()
        last = inputs.x.copy()
        last[1, 3] += 1.0
        with context.scope(training=False):
            one = layer.fprop(self.theta, tf.constant(inputs.x), inputs.target_segments).numpy()
            other = layer.fprop(self.theta, tf.constant(last), inputs.target_segments).numpy()
        assert_close(other[:, :3], one[:, :3], "order", what="a later token changes an earlier one")


def _arguments(layer: Any) -> int:
    """Returns the number of inputs that `fprop` needs besides the weights."""
    parameters = list(inspect.signature(layer.fprop).parameters.values())[1:]
    return sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def _same_bits(mine: NestedMap, theirs: NestedMap) -> bool:
    pairs = zip(mine.flatten(), theirs.flatten(), strict=True)
    return all(one.numpy().tobytes() == other.numpy().tobytes() for one, other in pairs)
