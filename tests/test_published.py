# tests: /docs/planned_and_published.md
"""Tests docs/planned_and_published.md and the table of its rows: data, text, and a plan."""

import math

import msgspec
import pytest

from docs.planned.published import decoders, page, rows
from docs.planned.published.trainings import TRAININGS
from lingvo_gshard.training.experiments import make_trainer
from lingvo_gshard.wings.planning.machines import efficiencies, topologies
from lingvo_gshard.wings.planning.machines.chips import CHIPS

FOUND = rows.load()
BY_KEY = {training.key: training for training in TRAININGS}


def billions(training):
    """Returns the parameters that the publisher states, or those in the name of a dense model."""
    if isinstance(training.decoder, decoders.Mixture):
        return training.decoder.parameters
    if training.has_experts:
        return 46.7
    return float(training.name.removesuffix(" FP8").split()[-1][:-1])


@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.key)
def test_models_have_the_parameters_of_their_names(training):
    params = training.decoder.experiment(training.length, ["input.batch_rows = 8"])
    specs = make_trainer(params).state_specs().theta.flatten()
    total = sum(math.prod(spec.shape) for spec in specs)
    assert total / 1e9 == pytest.approx(billions(training), rel=0.05)


def test_flops_are_those_of_the_papers_formula():
    """arXiv 2104.04473, equation 3: with recomputation; Megatron-LM counts MFU without it."""
    layers, model_dim, length, vocabulary = 36, 4096, 2048, 51_200
    decoder = decoders.megatron(layers, model_dim, 32, vocabulary, is_tied=True)
    matrices = layers * model_dim**2
    logits = vocabulary / (layers * model_dim)
    attention = length / (6 * model_dim)
    recomputed = 96 * matrices * (1 + attention + logits / 16)
    assert decoder.flops_per_token(length, recomputes=True) == pytest.approx(recomputed)
    once = 72 * matrices * (1 + attention + logits / 12)
    assert decoder.flops_per_token(length) == pytest.approx(once)


def test_published_shares_of_the_peak_follow():
    """As their tables state them: of MaxText's 64B on v5p, and Megatron-LM's 32B on H100."""
    for key, share in (("maxtext 64b v5p", 0.7031), ("megatron 32B h100", 0.46)):
        training = BY_KEY[key]
        assert page.utilization(training, training.published) == pytest.approx(share, rel=0.02)


@pytest.mark.parametrize(
    ("decoder", "length", "tokens", "teraflops"),
    [
        (decoders.QWEN_3_30B, 4096, 9299, 214),
        (decoders.QWEN_3_235B, 4096, 3269, 484),
        (decoders.DEEPSEEK_V3, 4096, 3848, 961),
        (decoders.DEEPSEEK_V3, 8192, 542.1, 152.415),
        (decoders.LLAMA_4_SCOUT, 8192, 2070.487, 225.491),
        (decoders.MIXTRAL_8X22B_DROPPED, 4096, 1326.307, 332.463),
    ],
)
def test_flops_of_experts_are_those_that_publishers_count(decoder, length, tokens, teraflops):
    """As they print both: Megatron Bridge 25.11, and the logs of MaxText's recipes."""
    counted = decoder.flops_per_token(length)
    assert counted == pytest.approx(1e12 * teraflops / tokens, rel=0.06)


def test_predictions_are_kept():
    row = next(iter(FOUND.values()))
    before = msgspec.structs.replace(row, predicted=1.5)
    assert rows.predicted(before, 2.0) == 1.5
    assert rows.predicted(None, 2.0) == 2.0


def test_groups_have_all_rows():
    groups = page.groups([(BY_KEY[key], row) for key, row in FOUND.items()])
    assert sum(int(count) for _, count, *_ in groups) == len(FOUND)
    names = [name for name, *_ in groups]
    assert "MaxText, TPU, experts" in names and "Megatron-LM, A100, dense" in names


def test_no_published_training_enters_a_plan():
    fields = ("product_efficiency", "fp8_efficiency")
    sources = [chip.sources[field] for chip in CHIPS.values() for field in fields]
    sources += [point.source for points in efficiencies.MEASURED.values() for point in points]
    for training in TRAININGS:
        assert not any(training.source in source for source in sources)
    for word in ("maxtext", "torchtitan", "Megatron"):
        assert not any(word.lower() in source.lower() for source in sources)


@pytest.mark.parametrize("path", page.TEXTS, ids=lambda path: path.name)
def test_a_page_is_up_to_date(path):
    committed = path.read_text(encoding="utf-8")
    assert page.text(path, FOUND) == committed, "out of date: python -m docs.planned.published"
    assert "{" not in committed


def test_every_training_has_a_row():
    assert set(FOUND) == set(BY_KEY)


@pytest.mark.parametrize("row", FOUND.values(), ids=lambda row: row.model)
def test_rows_are_consistent(row):
    training, topology = BY_KEY[row.model], topologies.get(row.topology)
    assert (row.topology, row.mesh, row.strategy) == (
        training.topology,
        training.mesh,
        training.strategy,
    )
    assert (row.devices, row.compiler) == (topology.devices, topology.kind)
    assert row.tokens == training.rows * training.length
    assert row.tokens_per_second == pytest.approx(row.tokens / row.seconds)
    assert 0 < row.bound < row.seconds
    assert sum(row.kinds.values()) == pytest.approx(row.seconds, rel=1e-3)
    # The planner counts useful FLOPs by formulas of its own, attention to visible positions alone.
    chip = row.tokens_per_second / row.chips
    assert page.utilization(training, chip) == pytest.approx(row.mfu, rel=0.2)


@pytest.mark.slow
def test_a_row_is_planned_again():
    training = BY_KEY["torchtitan llama-3.1-8b 8"]
    if topologies.get(training.topology).compiler == "cpu":
        pytest.skip("its compiler is not installed")
    made = rows.make(training)
    found = FOUND[training.key]
    assert made.peak == pytest.approx(found.peak, rel=0.02)
    assert made.seconds == pytest.approx(found.seconds, rel=0.02)
