"""Plans generation with a small Llama, and compares it with closed forms and with all layers."""

import dataclasses
import functools
import json

import pytest

import lingvo_gshard
from lingvo_gshard.wings.inference.programs import preparation
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of
from lingvo_gshard.wings.planning.experiments import PlanOptions
from lingvo_gshard.wings.planning.generation import GenerationOptions, plan_generation
from lingvo_gshard.wings.planning.machines import compilers, topologies
from tests.open_models.published import CONFIG

LAYERS, HEADS, KEY_HEADS, SIZE, MODEL, HIDDEN, VOCABULARY = 6, 4, 2, 16, 64, 128, 256
LENGTH, BATCH, DEVICES = 64, 8, 4
NARROW = 2
WEIGHTS = (
    2 * VOCABULARY * MODEL
    + MODEL
    + LAYERS * (2 * MODEL + 2 * MODEL * (HEADS + KEY_HEADS) * SIZE + 3 * MODEL * HIDDEN)
)
PRICE_PER_HOUR = 4.2

needs_libtpu = pytest.mark.skipif(compilers.installed() is None, reason="libtpu is missing")


def experiment(**values):
    config = CONFIG | {
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": SIZE,
        "hidden_size": MODEL,
        "intermediate_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": LENGTH,
    }
    return experiment_of(PublishedConfig(config | values, "c"), LENGTH, "bfloat16_weights")


@functools.cache
def planned(mesh="data=2,model=2", strategy="data_tensor", **options):
    return plan_generation(
        experiment(),
        topologies.get(f"cpu:{DEVICES}"),
        PlanOptions(mesh=mesh, strategy=strategy),
        GenerationOptions(**({"batch": BATCH} | options)),
    )


@pytest.mark.slow
def test_caches_and_weights_are_those_of_the_model():
    found = planned()
    per_text = 2 * LAYERS * KEY_HEADS * SIZE * LENGTH * NARROW
    assert found.cache_bytes_per_text == per_text
    # Rows over `data`, heads over `model`.
    assert found.cache_bytes == per_text * BATCH // DEVICES
    assert found.step.parameters.total == WEIGHTS
    # Norms stay whole, all other weights are in two parts.
    norms = MODEL * (1 + 2 * LAYERS)
    assert found.step.bytes_per_device.weights == NARROW * ((WEIGHTS - norms) // 2 + norms)
    assert found.step.bytes_per_device.inputs >= found.cache_bytes
    assert found.fits and found.bounded_by == "memory bandwidth"


@pytest.mark.slow
def test_shallow_models_tell_the_plan_of_all_layers():
    found, whole = planned(), planned(every_layer=True)
    for short, full in ((found.step, whole.step), (found.prefill, whole.prefill)):
        assert short.seconds_per_step == pytest.approx(full.seconds_per_step, rel=0.05)
        assert short.bytes_per_device.weights == full.bytes_per_device.weights
        assert short.bytes_per_device.peak == pytest.approx(full.bytes_per_device.peak, rel=0.05)
        assert short.flops.useful == full.flops.useful
        counts = [sum(row.count for row in plan.collectives) for plan in (short, full)]
        assert counts[0] == counts[1]
    assert found.cache_bytes == whole.cache_bytes


@pytest.mark.slow
@needs_libtpu
def test_weights_that_fit_beside_a_tpus_cores_are_read_in_every_step():
    """Two layers would fit there, and a call of many steps would read them once."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 24}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    model, found = experiment(**sizes, **heads), {}
    for every_layer in (False, True):
        found[every_layer] = plan_generation(
            model,
            topologies.get("v5e:4x4"),
            PlanOptions(mesh="model=16", strategy="tensor"),
            GenerationOptions(every_layer=every_layer, has_prefill=False),
        )
    short, full = found[False].step, found[True].step
    assert any("extrapolated" in note for note in short.notes)
    assert short.seconds_per_step == pytest.approx(full.seconds_per_step, rel=0.05)
    reads = short.bytes_per_device.weights / topologies.get("v5e:4x4").chip.memory_bandwidth
    assert found[False].seconds_per_token > 0.9 * reads
    # A row alone is multiplied by element, and that is no error of the planner.
    assert not any("products are" in note for plan in (short, full) for note in plan.notes)


@pytest.mark.slow
def test_a_prefill_needs_neither_the_last_layer_nor_the_softmax():
    found = planned(every_layer=True, prompt=32)
    pairs = 32 * 33 // 2 * 2 * 2 * HEADS * SIZE
    weights = 2 * 32 * MODEL * ((2 * HEADS + 2 * KEY_HEADS) * SIZE + 3 * HIDDEN)
    texts = 2  # one for each part of the rows
    useful = texts * (LAYERS - 1) * (weights + pairs) // DEVICES
    assert found.prefill.flops.useful == useful
    # What fills the last layer's keys and values, and pairs that a causal mask hides.
    assert useful <= found.prefill.flops.executed < 1.3 * useful
    assert not any("products are" in note for note in found.prefill.notes)


@pytest.mark.slow
def test_a_model_fits_only_if_it_can_be_loaded(monkeypatch):
    """Two devices hold the trained weights and the first of decoding, before they free any."""
    monkeypatch.setattr(preparation, "_LARGE", 0)
    found = planned(has_prefill=False)
    step = found.step.bytes_per_device
    assert step.weights < found.loading_bytes < 2 * step.weights
    # More than a step takes.
    most = 2**24
    monkeypatch.setattr("lingvo_gshard.wings.planning.generation.peak_bytes", lambda _: most)
    for capacity, fits in ((most, True), (most - 1, False)):
        topology = topologies.get(f"cpu:{DEVICES}")
        chip = dataclasses.replace(topology.chip, usable_bytes=capacity)
        again = plan_generation(
            experiment(num_hidden_layers=2),
            dataclasses.replace(topology, chip=chip),
            PlanOptions(mesh="data=2,model=2", strategy="data_tensor"),
            GenerationOptions(batch=2, has_prefill=False),
        )
        assert again.step.fits and again.fits == fits


@pytest.mark.slow
def test_a_call_of_steps_counts_all_of_them():
    found = planned(every_layer=True, has_prefill=False)
    step = found.step
    assert found.prefill is None and found.prompted is None
    assert step.tokens_per_step == BATCH * found.steps
    assert found.seconds_per_token * found.steps == pytest.approx(step.seconds_per_step)
    assert any(f"counts as {found.steps} iterations" in note for note in step.notes)
    # Every step multiplies with all weights but the table; XLA may pad.
    products = 2 * (WEIGHTS - VOCABULARY * MODEL) * BATCH * found.steps // DEVICES
    assert step.flops.executed == pytest.approx(products, rel=0.3)
    # In the middle of its own peak and that of memory: reading the weights takes the time.
    assert step.seconds_per_step_bound > found.steps * step.bytes_per_device.weights / 4.8e9


@pytest.mark.slow
def test_costs_are_those_of_a_million_tokens():
    found = plan_generation(
        experiment(num_hidden_layers=2),
        topologies.get("v5p:2x2x1"),
        PlanOptions(mesh="data=2,model=2", strategy="data_tensor"),
        GenerationOptions(batch=BATCH, has_prefill=False),
    )
    hours = 4 * found.step.seconds_per_step / (BATCH * found.steps) * 1e6 / 3600
    assert found.generated.chip_hours == pytest.approx(hours)
    assert found.generated.price == pytest.approx(hours * PRICE_PER_HOUR)
    assert json.loads(found.to_json())["generated"]["currency"] == "USD"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 3}, "`batch=3`: the mesh decodes 2 batches at once; expected 1 or a multiple"),
        ({"prompt": 65}, "`prompt=65` is more than the 64 positions of a text"),
        ({"mesh": "data=8"}, "`mesh=data=8` has 8 devices, but `topology=cpu:4` has 4"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        planned(**options)


def test_a_translation_model_is_refused():
    translation = lingvo_gshard.experiment("translation.quickstart")
    translation.task.source_vocabulary_size = translation.task.target_vocabulary_size = 64
    with pytest.raises(ValueError, match="`generate` plans language models"):
        plan_generation(translation, topologies.get("cpu:1"), PlanOptions(), GenerationOptions())
