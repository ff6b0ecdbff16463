"""Compares width scaling with the tables of its paper, and activations over widths."""

import math

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context, initializers
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.embedding import LearnedPositions
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.runtime.spmd import SpmdRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tasks import LanguageModelTask
from lingvo_gshard.training.step.adafactor import Adafactor
from lingvo_gshard.training.step.adam import Adam
from lingvo_gshard.training.step.schedules import Linear
from lingvo_gshard.training.step.trainer import Trainer
from lingvo_gshard.wings.optimizers.lion import Lion
from lingvo_gshard.wings.optimizers.momentum import Momentum
from lingvo_gshard.wings.optimizers.muon import Muon
from tests.layers.stacks.executions import loop, pipeline
from tests.training.optim import one_weight

V, B, L = 11, 4, 6
BASE = {"M": 8, "H": 16, "N": 2, "D": 4}
UNTIED = {"tie_softmax": False}


def params_of(width: int, base_widths=None, **values):
    """Returns the Params of a model `width` times as wide as the base: more heads, wider layers."""
    p = LanguageModelTask.params().set(vocabulary_size=V, model_dim=8 * width)
    p.decoder.set(num_layers=2, num_heads=2 * width, hidden_dim=16 * width, moe_every=2)
    p.decoder.moe = MixtureOfExperts.params().set(num_experts=3, group_size=L)
    p.decoder.moe.experts.activation = "swiglu"
    p.decoder.layer.self_attention.use_bias = True
    p.positions = LearnedPositions.params().set(max_length=L)
    p.width_scaling.base_widths = base_widths or {}
    for name, value in values.items():
        p.set_path(name.replace("__", "."), value)
    return p


def specs_by_name(params) -> dict[str, VariableSpec]:
    """Returns the declarations by the names that layers have without a loop."""
    flat = params.instantiate().variable_specs().flatten()
    return {name: spec for spec in flat for name in spec.slices or (spec.path,)}


def table_3(name: str) -> tuple[float, float]:
    """Returns the factors of deviation and rate of a model of four times the width.

    arXiv 2203.03466, table 3, in the columns of Adam: the deviation is the root of the variance.
    """
    if name.endswith((".scale", ".bias", "positions.table")) or ".b_" in name:
        return 1.0, 1.0
    if name in ("softmax.w", "decoder.layers[1].feed_forward.router.w_gate"):
        return math.sqrt(1 / 4**2), 1 / 4
    if name == "embedding.table":
        # Read with the factor sqrt(M), which grows twofold: both products are those of the base.
        return 1 / 2, 1 / 2
    return math.sqrt(1 / 4), 1 / 4


EXECUTIONS = {
    "one by one": {},
    "loop": {"decoder__execution": loop()},
    "stages": {"decoder__num_layers": 4, "decoder__execution": pipeline(2)},
}


@pytest.mark.parametrize("name", EXECUTIONS)
@pytest.mark.parametrize("softmax", [UNTIED, {"logit_scale": 0.5}], ids=["untied", "tied"])
def test_deviations_and_rates_are_those_of_the_paper(softmax, name):
    values = {**softmax, **EXECUTIONS[name]}
    base = specs_by_name(params_of(1, **values))
    wide = specs_by_name(params_of(4, BASE, **values))
    assert list(wide) == list(base)
    assert any("experts.w_factor" in path for path in wide)
    for path, spec in wide.items():
        deviation, rate = table_3(path.replace("layers[3]", "layers[1]"))
        start = base[path].initializer
        assert spec.initializer.kind == start.kind, path
        assert spec.initializer.scale == pytest.approx(deviation * start.scale), path
        assert spec.learning_rate_factor == pytest.approx(rate), path


def test_initial_values_have_the_declared_deviation():
    specs = params_of(4, BASE, **UNTIED).instantiate().variable_specs()
    w = specs.softmax.w.init(tf.constant([1, 0])).numpy()
    assert np.std(w) == pytest.approx(1 / math.sqrt(8) / 4, rel=0.15)


def test_the_base_model_is_the_same_without_width_scaling():
    plain, scaled = (specs_by_name(params_of(1, base)) for base in (None, BASE))
    assert plain == scaled


def test_a_number_as_the_factor_of_embeddings_is_that_of_all_widths():
    values = {"embedding_scale": 3.0, "logit_scale": 1 / 4}
    base = specs_by_name(params_of(1, **values))["embedding.table"]
    wide = specs_by_name(params_of(4, BASE, **values))["embedding.table"]
    assert wide.initializer.scale == pytest.approx(base.initializer.scale)
    assert wide.learning_rate_factor == 1.0


def test_glorots_initial_values_follow_the_inputs_alone():
    """Wider layers with heads as before: variance 2 / (M + N D) would not be that of 1 / M."""
    heads = {"decoder__layer__self_attention__head_dim": 4, "decoder__num_heads": 2, **UNTIED}
    base, wide = specs_by_name(params_of(1, **heads)), specs_by_name(params_of(4, BASE, **heads))
    for name, factor in (("w_out", 1.0), ("w_value", 1 / 4)):
        path = f"decoder.layers[0].self_attention.{name}"
        expected = base[path].initializer.scale * factor
        assert wide[path].initializer.scale == pytest.approx(expected), name


def test_a_letter_of_several_sizes_takes_a_base_for_each():
    grouped = {"decoder__layer__self_attention__num_key_value_heads": 4, **UNTIED}
    wide = specs_by_name(params_of(4, BASE | {"N": (1, 2)}, **grouped))
    assert wide["decoder.layers[0].self_attention.w_out"].learning_rate_factor == 1 / 4


@pytest.mark.parametrize("cls", [Adam, Lion])
def test_rates_change_steps_and_leave_the_decay(cls):
    """One step of a weight: elements move by rate, and decay by what the schedule says."""
    spec = VariableSpec(
        "w", "MH", (2, 2), "float32", initializers.constant(0.0), learning_rate_factor=0.25
    )
    start = np.array([[1.0, -2.0], [3.0, 4.0]], np.float32)
    gradient = np.array([[[0.1, -0.2], [0.3, 0.4]]], np.float32)
    options = {"weight_decay": 0.5, "learning_rate_factors": {"w": 0.5}}
    optimizer = cls.params().set(**options).instantiate()
    found, _ = one_weight.train(optimizer, spec, start, gradient, np.array([0.1], np.float32))
    own = 0.5 * 0.1
    expected = start - own * (0.25 * np.sign(gradient[0]) + 0.5 * start)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def trainer_of(task, learning_rate=0.02, **values) -> Trainer:
    schedule = Linear.params().set(learning_rate=learning_rate, warmup_steps=0)
    step = Trainer.params().set(schedule=schedule, **{"optimizer": Adam.params(), **values})
    return step.instantiate(task)


def batch() -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(0)
    inputs, labels = numbers.integers(0, V, (2, B, L), np.int32)
    return {
        "target_inputs": inputs,
        "target_labels": labels,
        "target_segments": np.ones((B, L), np.int32),
        "target_positions": np.tile(np.arange(L, dtype=np.int32), (B, 1)),
    }


def moved(width: int, base_widths, steps: int = 3, **values) -> dict[str, float]:
    """Returns how far a few steps move activations, as the root mean square of an element."""
    task = params_of(width, base_widths, decoder__moe_every=0, **values)
    trainer = trainer_of(task)
    tensors = NestedMap({name: tf.constant(value) for name, value in batch().items()})

    def observed(theta: NestedMap) -> dict[str, np.ndarray]:
        found = {}
        with context.scope(training=False):
            found["states"] = trainer.task._states(theta, tensors)
            found["logits"] = trainer.task.output_logits(theta, found["states"])
        return found

    step = tf.function(trainer.train_step, autograph=False)
    state = trainer.init_state()
    before = observed(state.theta)
    for _ in range(steps):
        state, _ = step(state, tensors)
    after = observed(state.theta)
    return {name: float(np.sqrt(np.mean((after[name] - before[name]) ** 2))) for name in before}


def test_coordinates_do_not_grow_with_the_width():
    """With standard rates, the logits of a wider model move farther (section D.1)."""
    narrow = moved(1, BASE)
    wide = moved(16, BASE, logit_scale=1 / 4)
    standard = moved(16, None)
    for name in ("states", "logits"):
        assert wide[name] < 1.5 * narrow[name], name
    assert standard["logits"] > 2.5 * narrow["logits"]
    assert wide["logits"] > 0.3 * narrow["logits"]


@pytest.mark.slow
def test_a_mesh_trains_a_scaled_model_as_one_device():
    def losses(runtime):
        runtime.init_state()
        return [runtime.train_step(batch()).read()["loss"] for _ in range(4)]

    def trainer():
        task = params_of(2, BASE, decoder__execution=loop(), logit_scale=0.5**0.5)
        return trainer_of(task, precision="fp8", micro_batches=2)

    expected = losses(SingleDeviceRuntime(trainer()))
    partitioning = Partitioning.make("data=2,model=2", "expert_fsdp_tensor")
    found = losses(SpmdRuntime(trainer(), partitioning, devices_for(4)))
    np.testing.assert_allclose(found, expected, rtol=0.02)
    assert found[-1] < found[0]


@pytest.mark.parametrize(
    ("base", "values", "message"),
    [
        (BASE, {}, r"task.logit_scale is 1; 0.5 expected with task.width_scaling.base_widths"),
        (BASE | {"m": 3}, UNTIED, r"base_widths: 'm' is no width of the model. Valid: D, H"),
        (BASE | {"V": 3}, UNTIED, r"base_widths: 'V' is no width of the model"),
        ({"M": 8}, UNTIED, r"base_widths lacks 'D', over which products with decoder.*; give its"),
        (
            BASE | {"H": 0},
            UNTIED,
            r"base_widths\['H'\] is 0, and the model has the sizes \[64\]",
        ),
        (BASE | {"H": (4, 8)}, UNTIED, r"base_widths\['H'\] is \(4, 8\), and the model has the"),
        (
            BASE,
            {"decoder__num_heads": 2, **UNTIED},
            r"decoder.layers\[0\].self_attention: D is 4 times as wide .*; set 0.125, which falls",
        ),
        (BASE, {"lora__rank": 2, **UNTIED}, r"task.lora.rank is 2: adapters have no base model"),
    ],
)
def test_what_does_not_fit_is_refused(base, values, message):
    with pytest.raises(ValueError, match=message):
        params_of(4, base, **values).instantiate().variable_specs()


def test_a_queries_factor_of_ones_own_is_taken():
    heads = {"decoder__num_heads": 2, **UNTIED}
    factor = {"decoder__layer__self_attention__query_scale": 0.125}
    specs_by_name(params_of(4, BASE, **heads, **factor))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (Muon.params(), "step.optimizer is Muon, but task.width_scaling.base_widths has rules for"),
        (Momentum.params(), "step.optimizer is Momentum, but"),
        (Adafactor.params().set(relative_update=True), "is Adafactor with relative_update = True"),
    ],
)
def test_optimizers_with_other_tables_are_refused(optimizer, message):
    with pytest.raises(ValueError, match=message):
        trainer_of(params_of(4, BASE, **UNTIED), optimizer=optimizer)
    trainer_of(params_of(4, **UNTIED), optimizer=optimizer)


def test_the_model_without_its_features_computes_the_same():
    task = params_of(4, BASE, logit_scale=0.5).instantiate()
    tensors = NestedMap({name: tf.constant(value) for name, value in batch().items()})
    theta = task.init(1)
    with context.scope(training=False):
        expected = task.logits(theta, tensors)
        found = task.plain.logits(task.merged(theta), tensors)
    assert "width_scaling" not in task.plain.features
    np.testing.assert_array_equal(found, expected)
