# tests: wings/services/routers/choices.py, wings/services/routers/replayed.py
"""Tests recorded choices of routers and their replay, in runs of gshard-train."""

import json
import types

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core import context
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import token_context
from lingvo_gshard.layers.moe import TopKRouter
from lingvo_gshard.layers.moe.groups import Groups
from lingvo_gshard.tools import train
from lingvo_gshard.training.run.logdir import Logdir
from lingvo_gshard.wings.pipeline.pipeline import Pipeline
from lingvo_gshard.wings.published_layers.routers.expert_choice import ExpertChoiceRouter
from lingvo_gshard.wings.published_layers.routers.forced_balance import ForcedBalanceRouter
from lingvo_gshard.wings.services.routers.choices import Choices
from lingvo_gshard.wings.services.routers.replayed import Replayed
from tests import tiny
from tests.layers.moe.algorithm import softmax
from tests.runtime import tiny_translation as model
from tests.tools import tiny_translation

STEPS, LAST = 3, 2
LAYERS = [
    "encoder.layers[0].feed_forward",
    "decoder.layers[0].feed_forward",
    "decoder.layers[1].feed_forward",
]
IN_PARTS = ("step.micro_batches = 2", "task.decoder.execution.interleaved = 2")


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Returns the flags of a model whose decoder is a loop over two layers."""
    settings = {f"task__{side}__moe__group_size": 32 for side in ("encoder", "decoder")}
    settings |= {"task__decoder__num_layers": 2, "input__batch_rows": 8}
    return [
        *tiny_translation.write(tmp_path_factory.mktemp("data"), **settings),
        "--gin_param=task.decoder.execution = @lingvo_gshard.wings.repeat.loop.Repeat",
        "--gin_param=run.routers.every_steps = 0",
        f"--gin_param=step.schedule.total_steps = {STEPS}",
        f"--steps={STEPS}",
    ]


def trained(flags, logdir, *params, mesh=0, record=True, replay=None):
    """Trains, and returns the directory."""
    given = list(params)
    given += [f"run.record_choices = (1, {LAST})"] if record else []
    given += [f"run.replay_choices = '{replay}'"] if replay else []
    where = [f"--mesh=data={mesh}", "--strategy=expert"] if mesh else ["--runtime=local"]
    options = [*where, *(f"--gin_param={one}" for one in given), f"--logdir={logdir}"]
    assert train.main(["gshard-train", *flags, *options]) == 0
    return logdir


def losses(logdir):
    rows = [json.loads(line) for line in (logdir / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["gradient_norm"]) for row in rows]


def recorded(logdir):
    """Returns the arrays of each recorded step."""
    return [dict(np.load(file)) for file in sorted((logdir / "choices").iterdir())]


def share_of_equal(one, other):
    """Returns the share of the experts and kept flags of all steps that are equal."""
    names = [name for name in one[0] if name != "batch_digest"]
    return np.mean([np.mean(a[n] == b[n]) for a, b in zip(one, other, strict=True) for n in names])


@pytest.fixture(scope="module")
def first(flags, tmp_path_factory):
    return trained(flags, tmp_path_factory.mktemp("first"))


@pytest.mark.slow
def test_files_have_experts_and_kept_flags_of_each_token(first):
    files = [path.name for path in sorted((first / "choices").iterdir())]
    assert files == ["step-00000001.npz", "step-00000002.npz"]
    found = recorded(first)[0]
    names = {f"{layer}/{what}" for layer in LAYERS for what in ("experts", "kept")}
    assert found.keys() == names | {"batch_digest"}
    for layer in LAYERS:
        expert, kept = found[f"{layer}/experts"], found[f"{layer}/kept"]
        assert expert.shape == kept.shape == (8, 64, 2) and kept.dtype == bool
        assert len(np.unique(expert)) > 2 and (expert[..., 0] != expert[..., 1]).all()
        assert 0 < kept.mean() < 1
    one, other = (found[f"{layer}/experts"] for layer in LAYERS[1:])
    assert np.mean(one == other) < 0.9


@pytest.mark.slow
def test_a_replay_in_the_same_precision_is_equal_to_the_bit(flags, first, tmp_path, capsys):
    replayed = trained(flags, tmp_path / "replayed", record=False, replay=first)
    assert losses(replayed) == losses(first)
    said = capsys.readouterr().out
    assert f"step {LAST + 1}: the replay of routers' choices has ended" in said
    assert "was compiled again" not in said


@pytest.mark.slow
def test_bfloat16_has_the_choices_of_float32_only_with_a_replay(flags, first, tmp_path):
    low = "step.precision = 'bfloat16'"
    own = trained(flags, tmp_path / "own", low)
    replayed = trained(flags, tmp_path / "replayed", low, replay=first)
    assert share_of_equal(recorded(own), recorded(first)) < 1
    assert share_of_equal(recorded(replayed), recorded(first)) == 1
    assert losses(replayed) != losses(first)


@pytest.mark.slow
def test_eight_devices_have_the_choices_of_one(flags, first, tmp_path):
    replayed = trained(flags, tmp_path / "replayed", mesh=8, replay=first)
    assert share_of_equal(recorded(replayed), recorded(first)) == 1
    np.testing.assert_allclose(losses(replayed)[:LAST], losses(first)[:LAST], rtol=1e-5)


@pytest.mark.slow
def test_micro_batches_in_interleaved_parts_have_the_choices_of_their_rows(flags, tmp_path):
    one = trained(flags, tmp_path / "one", *IN_PARTS)
    two = trained(flags, tmp_path / "two", *IN_PARTS, mesh=2, replay=one)
    assert share_of_equal(recorded(two), recorded(one)) == 1
    np.testing.assert_allclose(losses(two)[:LAST], losses(one)[:LAST], rtol=1e-5)
    found = recorded(one)[0]
    # Every row has choices, and rows have choices of their own.
    expert = found[f"{LAYERS[1]}/experts"]
    assert expert.min() >= 0 and len({row.tobytes() for row in expert}) == 8


@pytest.mark.slow
def test_another_batch_is_refused_with_both_digests(flags, first, tmp_path):
    other = int(recorded(first)[0]["batch_digest"])
    logdir = tmp_path / "other"
    options = ["--runtime=local", "--gin_param=step.seed = 7", f"--logdir={logdir}"]
    options.append(f"--gin_param=run.replay_choices = '{first}'")
    with pytest.raises(UserError, match=rf"step 1 has a batch with the digest \d+.*{other};"):
        train.main(["gshard-train", *flags, *options])


def test_gates_are_those_of_the_own_logits_at_the_replayed_experts():
    rng = np.random.default_rng(3)
    shape = (2, 5)
    router = TopKRouter.params().set(model_dim=4, num_experts=6, k=2)
    router = router.set(capacity_factor=6.0).instantiate(path="router")
    x_GSM = rng.normal(size=(*shape, 4)).astype(np.float32)
    w_ME = rng.normal(size=(4, 6)).astype(np.float32)
    expert_GSk = np.argsort(rng.random((*shape, 6)))[..., :2]
    kept_GSk = rng.random((*shape, 2)) < 0.3
    code_GSk = (1 + 2 * expert_GSk + kept_GSk).astype(np.int32)
    code_GSk[0, 0] = 0  # This token chooses for itself.
    given = {"router": tf.constant(code_GSk)}
    groups = Groups(*shape, 5)
    with (
        context.scope(training=True),
        groups.ordered(),
        token_context.override(on_choice=Replayed(), choices=given),
    ):
        found = router.fprop(NestedMap(w_gate=w_ME), tf.constant(x_GSM), tf.ones(shape))
    shares_GSE = softmax(x_GSM @ w_ME)
    expert_GSk[0, 0] = np.argsort(-shares_GSE[0, 0])[:2]
    gate_GSk = np.take_along_axis(shares_GSE, expert_GSk, -1)
    gate_GSk /= gate_GSk.sum(-1, keepdims=True)
    for i, assignment in enumerate(found.assignments):
        kept_GS = assignment.kept_GS.numpy()
        np.testing.assert_array_equal(assignment.expert_GS, expert_GSk[..., i])
        np.testing.assert_array_equal(kept_GS.flat[1:], kept_GSk[..., i].flat[1:])
        np.testing.assert_allclose(
            assignment.gate_GS, np.where(kept_GS, gate_GSk[..., i], 0.0), atol=1e-6
        )
        assert (assignment.wanted_GS.numpy() == 1).all()


def test_routers_that_do_not_ask_for_their_experts_are_refused():
    params = ForcedBalanceRouter.params().set(model_dim=4, num_experts=6)
    router = params.instantiate(path="router")
    with (
        context.scope(training=True),
        token_context.override(on_choice=Replayed(), choices={}),
        pytest.raises(UserError, match="router: ForcedBalanceRouter computes its choices in a way"),
    ):
        router.fprop(NestedMap(w_gate=tf.zeros((4, 6))), tf.zeros((1, 5, 4)), tf.ones((1, 5)))


def observed(tmp_path, values=(), **options):
    trainer = model.trainer(num_experts=4, stack_values=dict(values))
    params = tiny.experiment_params(steps=5)
    params.run.set(**options)
    return Choices(types.SimpleNamespace(params=params, trainer=trainer, logdir=Logdir(tmp_path)))


def test_what_cannot_be_replayed_is_refused(tmp_path):
    recording = {"record_choices": (1, 2)}
    observed(tmp_path, **recording)
    with pytest.raises(UserError, match=r"run.replay_choices='.*choices has no recorded choices"):
        observed(tmp_path, replay_choices=str(tmp_path / "none"))
    by_experts = {"moe.router": ExpertChoiceRouter.params().set(allow_causal=True)}
    with pytest.raises(UserError, match=r"ExpertChoiceRouter of .* lets experts choose tokens"):
        observed(tmp_path, by_experts, **recording)
    staged = {"execution": Pipeline.params().set(stages=2), "moe_every": 1}
    with pytest.raises(UserError, match=r"encoder.layers is a Pipeline, whose stages"):
        observed(tmp_path, staged, **recording)


@pytest.mark.parametrize("steps", [(3,), (0, 2), (3, 2), (1, 2.5)])
def test_steps_that_are_no_range_are_refused(steps):
    params = tiny.experiment_params(steps=5).run.set(record_choices=steps)
    with pytest.raises(UserError, match="run.record_choices=.*first and the last step"):
        params.instantiate()
