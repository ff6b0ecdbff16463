"""Tests that every layer of the conformance registry has to pass."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.config.experiment import Experiment
from lingvo_gshard.core.config.params_text import experiment_from_text
from lingvo_gshard.core.initializers import Initializer
from lingvo_gshard.core.letters import check_layout
from lingvo_gshard.core.nested_map import NestedMap
from tests.layers import conformance, conformance_cases
from tests.tolerances import TOLERANCES, assert_close
from tests.training.optim.decayed import check_decay

BY_NAME = {case.name: case for case in conformance_cases.CASES}
# Step sizes of the difference quotients. A large step may cross a kink of ReLU or change the
# routing, and a small one suffers from rounding. A wrong gradient fails for all of them.
STEPS = (1e-2, 3e-3, 1e-3)

each_layer = pytest.mark.parametrize("name", conformance_cases.names(BY_NAME))
# "jit" traces what "function" traces, and training all but a few constants of evaluation. Tests of
# tasks, runtimes and decoding compare compiled evaluation of whole models with eager evaluation.
RUNS = [
    pytest.param(
        runner,
        training,
        id=f"{runner}-{'training' if training else 'evaluation'}",
        marks=[pytest.mark.slow]
        if runner == "function" or (runner, training) == ("jit", False)
        else [],
    )
    for runner in conformance.RUNNERS
    for training in (True, False)
]
each_run = pytest.mark.parametrize(("runner", "training"), RUNS)
each_compiled_run = pytest.mark.parametrize(
    ("runner", "training"), [run for run in RUNS if not run.id.startswith("eager")]
)


@functools.cache
def subject(name: str) -> tuple[NestedMap, NestedMap]:
    """Returns the weights of the layer and the inputs as tensors."""
    theta = conformance.make_theta(BY_NAME[name].build())
    return theta, conformance.make_inputs().transform(tf.constant)


@functools.cache
def runnable(name: str, training: bool, runner: str):
    return conformance.RUNNERS[runner](conformance.pass_of(BY_NAME[name], training))


def run(name: str, training: bool, runner: str, seed: int = 5) -> NestedMap:
    return runnable(name, training, runner)(*subject(name), tf.constant([seed, 0]))


def same_bits(mine: NestedMap, theirs: NestedMap) -> bool:
    pairs = zip(mine.flatten(), theirs.flatten(), strict=True)
    return all(one.numpy().tobytes() == other.numpy().tobytes() for one, other in pairs)


@each_layer
@each_compiled_run
def test_all_runners_agree(name, training, runner):
    expected = run(name, training, "eager")
    actual = run(name, training, runner)
    tf.nest.assert_same_structure(actual, expected)
    for (path, one), other in zip(actual.flatten_items(), expected.flatten(), strict=True):
        assert one.dtype == other.dtype, path
        assert_close(one, other, "order")


@each_layer
@each_run
def test_only_random_draws_depend_on_the_seed(name, training, runner):
    result = run(name, training, runner)
    assert same_bits(result, run(name, training, runner))
    draws = training and BY_NAME[name].draws
    assert same_bits(result, run(name, training, runner, seed=6)) == (not draws)


@each_layer
def test_evaluation_needs_no_seed(name):
    theta, inputs = subject(name)
    case = BY_NAME[name]
    with context.scope(training=False):
        output = case.call(case.build(), theta, inputs)
    np.testing.assert_array_equal(output, run(name, False, "eager").output)


@each_layer
@pytest.mark.parametrize(
    "training",
    [
        pytest.param(True, id="training"),
        pytest.param(False, id="evaluation", marks=pytest.mark.slow),
    ],
)
def test_gradients_match_difference_quotients(name, training):
    theta, inputs = subject(name)
    function = runnable(name, training, "jit")
    sources = NestedMap(theta=theta, x=inputs.x, memory=inputs.memory)
    gradients = run(name, training, "jit").gradients.flatten()
    rng = np.random.default_rng(11)

    def value(index: int, direction: np.ndarray, step: float) -> float:
        leaves = sources.flatten()
        leaves[index] = leaves[index] + (step * direction).astype(np.float32)
        moved = sources.pack(leaves)
        moved_inputs = NestedMap(inputs, x=moved.x, memory=moved.memory)
        return conformance.objective(function(moved.theta, moved_inputs, tf.constant([5, 0])))

    specs = NestedMap(theta=BY_NAME[name].build().variable_specs())
    by_rules = {path for path, spec in specs.flatten_items() if spec.update_rule}
    for index, (path, _) in enumerate(sources.flatten_items()):
        if path in by_rules:
            # Its gradient carries the value that was reported to its update rule.
            continue
        gradient = gradients[index].numpy().astype(np.float64)
        norm = np.linalg.norm(gradient)
        direction = _unit(rng.normal(size=gradient.shape)) + gradient / max(norm, 1e-9)
        expected, slopes = (gradient * direction).sum(), []
        allowed = TOLERANCES["difference"] * max(norm, 0.05)
        for h in STEPS:
            slopes.append((value(index, direction, h) - value(index, direction, -h)) / (2 * h))
            if abs(slopes[-1] - expected) <= allowed:
                break
        else:
            pytest.fail(f"{path}: slopes {slopes}, gradient {expected}, allowed {allowed}")


@each_layer
def test_weights_match_their_specs(name):
    layer = BY_NAME[name].build()
    specs, theta, again = layer.variable_specs(), layer.init(3), layer.init(3)
    other = layer.init(4)
    rows = (specs.flatten_items(), theta.flatten_items(), again.flatten(), other.flatten())
    for (path, spec), (theta_path, weight), same, different in zip(*rows, strict=True):
        assert path == theta_path and spec.path == f"layer.{path}"
        check_layout(spec.layout, len(spec.shape))
        assert (tuple(weight.shape), weight.dtype.name) == (spec.shape, spec.dtype)
        assert np.isfinite(weight).all()
        np.testing.assert_array_equal(weight, same)
        assert isinstance(spec.initializer, Initializer)
        is_constant = spec.initializer.kind == "constant"
        assert np.array_equal(weight, different) == is_constant, path


@each_layer
def test_biases_and_scales_do_not_decay(name):
    check_decay(BY_NAME[name].build().variable_specs())


@each_layer
def test_params_round_trip_through_text(name):
    experiment = Experiment.params().set(name=name, task=BY_NAME[name].params)
    read = experiment_from_text(experiment.to_text())
    assert read.diff(experiment) == []
    assert read.task == BY_NAME[name].params


@each_layer
def test_padding_has_no_effect(name):
    theta, inputs = subject(name)
    function = runnable(name, False, "eager")
    result = run(name, False, "eager")
    disturbed = _disturb_padding(conformance.make_inputs())
    other = function(theta, disturbed.transform(tf.constant), tf.constant([5, 0]))
    real = inputs.target_segments.numpy() > 0 if result.output.shape.rank else ...
    np.testing.assert_array_equal(result.output.numpy()[real], other.output.numpy()[real])
    assert same_bits(result.losses, other.losses)
    assert same_bits(result.metrics, other.metrics)


@pytest.mark.parametrize(
    "name", conformance_cases.names([case.name for case in conformance_cases.CASES if case.packs])
)
def test_packing_does_not_change_a_sentence(name):
    case, (theta, inputs) = BY_NAME[name], subject(name)
    output = run(name, False, "eager").output.numpy()
    sentences = _sentences(inputs.target_segments.numpy())
    unpacked = _unpack(conformance.make_inputs(), sentences)
    with context.scope(training=False):
        unpacked_output = case.call(case.build(), theta, unpacked.transform(tf.constant)).numpy()
    for row, (packed_row, segment) in enumerate(sentences):
        packed = output[packed_row, inputs.target_segments.numpy()[packed_row] == segment]
        assert_close(unpacked_output[row, : len(packed)], packed, "order")


@pytest.mark.parametrize("option", ["dtype", "fprop_dtype"])
def test_a_task_runs_in_bfloat16(option):
    case = BY_NAME["TranslationTask.loss"]
    theta, inputs = subject(case.name)
    task = case.params.copy().set(**{option: "bfloat16"}).instantiate(path="layer")
    specs = task.variable_specs().flatten()
    assert {s.dtype for s in specs} == {"bfloat16" if option == "dtype" else "float32"}
    theta = task.variable_specs().pack(
        tf.cast(w, s.dtype) for w, s in zip(theta.flatten(), specs, strict=True)
    )
    seen = {}
    with context.scope(training=False, on_output=seen.__setitem__):
        loss = task.loss(theta, inputs)[0]
    made = {output.dtype.name for path, output in seen.items() if "/" not in path}
    assert made == {"bfloat16" if option == "fprop_dtype" else "float32"}
    assert loss.dtype == tf.float32
    assert_close(loss, run(case.name, False, "eager").output, "bfloat16")


def _unit(direction: np.ndarray) -> np.ndarray:
    return direction / np.linalg.norm(direction)


def _disturb_padding(inputs: NestedMap) -> NestedMap:
    """Returns the inputs with other values in padding, of rows and of the memory."""
    rng = np.random.default_rng(13)
    for name, value in inputs.items():
        side = "source" if value.shape[1] == conformance.K else "target"
        padding = inputs[f"{side}_segments"] == 0
        if value.dtype == np.float32:
            value[padding] = 100 * rng.normal(size=value[padding].shape)
        elif name in ("source_ids", "target_inputs", "target_labels"):
            value[padding] = (value[padding] + 1) % conformance.V
    return inputs


def _sentences(segments_BL: np.ndarray) -> list[tuple[int, int]]:
    """Returns (row, segment) of each packed sentence."""
    return [(row, s) for row, r in enumerate(segments_BL) for s in np.unique(r) if s]


def _unpack(inputs: NestedMap, sentences: list[tuple[int, int]]) -> NestedMap:
    """Returns the same sentences, each at the beginning of a row of its own."""
    rng = np.random.default_rng(17)
    unpacked = NestedMap()
    for name, value in inputs.items():
        side = "source" if value.shape[1] == conformance.K else "target"
        shape = (len(sentences), *value.shape[1:])
        is_float = value.dtype == np.float32
        unpacked[name] = (
            rng.normal(size=shape).astype(np.float32) if is_float else np.zeros(shape, "i4")
        )
        for row, (packed_row, segment) in enumerate(sentences):
            chosen = value[packed_row, inputs[f"{side}_segments"][packed_row] == segment]
            unpacked[name][row, : len(chosen)] = 1 if name.endswith("_segments") else chosen
    return unpacked
