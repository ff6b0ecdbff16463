# tests: wings/services/routers/choices.py, wings/services/routers/replayed.py
# tests: layers/moe/routers/selection.py, wings/services/run_options.py
"""Tests recorded choices of routers and their replay, in runs of gshard-train."""

import json

import numpy as np
import pytest

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools import train
from tests.tools import tiny_translation

STEPS, LAST = 4, 3
LAYERS = ["encoder.layers[0].feed_forward", "decoder.layers[0].feed_forward"]


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    return [
        *tiny_translation.write(tmp_path_factory.mktemp("data")),
        "--gin_param=run.routers.every_steps = 0",
        "--gin_param=run.log_every_steps = 1",
        f"--gin_param=step.schedule.total_steps = {STEPS}",
        f"--steps={STEPS}",
    ]


def trained(flags, logdir, *more, record=True, replay=None):
    """Trains, and returns the directory."""
    options = [f"--gin_param=run.record_choices = (1, {LAST})"] if record else []
    options += [f"--gin_param=run.replay_choices = '{replay}'"] if replay else []
    options += [] if any(m.startswith("--mesh") for m in more) else ["--runtime=local"]
    assert train.main(["gshard-train", *flags, *options, *more, f"--logdir={logdir}"]) == 0
    return logdir


def losses(logdir):
    rows = [json.loads(line) for line in (logdir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows]


def recorded(logdir):
    """Returns the arrays of each recorded step."""
    files = sorted((logdir / "choices").iterdir())
    return [dict(np.load(file)) for file in files]


def share_of_equal(one, other):
    """Returns the share of the choices of all steps that are equal."""
    names = [name for name in one[0] if name != "batch_digest"]
    return np.mean([np.mean(a[n] == b[n]) for a, b in zip(one, other, strict=True) for n in names])


@pytest.fixture(scope="module")
def first(flags, tmp_path_factory):
    return trained(flags, tmp_path_factory.mktemp("first"))


def test_files_have_experts_and_kept_flags_of_each_token(first):
    found = recorded(first)
    assert len(found) == LAST
    assert not [path for path in (first / "choices").iterdir() if path.suffix != ".npz"]
    layers = {name.rpartition("/")[0] for name in found[0] if "/" in name}
    assert layers >= set(LAYERS)
    for name in layers:
        expert, kept = found[0][f"{name}/experts"], found[0][f"{name}/kept"]
        assert expert.shape == kept.shape and expert.shape[-1] == 2 and kept.dtype == bool
        assert len(np.unique(expert)) > 1 and (expert[..., 0] != expert[..., 1]).all()
        assert 0 < kept.mean() < 1


def test_a_replay_in_the_same_precision_is_equal_to_the_bit(flags, first, tmp_path, capsys):
    replayed = trained(flags, tmp_path / "replayed", record=False, replay=first)
    assert losses(replayed) == losses(first)
    said = capsys.readouterr().out
    assert f"step {LAST + 1}: the replay of routers' choices has ended" in said
    assert "was compiled again" not in said


def test_bfloat16_has_the_choices_of_float32_only_with_a_replay(flags, first, tmp_path):
    low = "--gin_param=step.precision = 'bfloat16'"
    own = trained(flags, tmp_path / "own", low)
    replayed = trained(flags, tmp_path / "replayed", low, replay=first)
    assert share_of_equal(recorded(own), recorded(first)) < 1
    assert share_of_equal(recorded(replayed), recorded(first)) == 1
    assert losses(replayed) != losses(first)


@pytest.mark.parametrize(
    "more",
    [
        ["--mesh=expert=8"],
        ["--mesh=expert=8", "--gin_param=step.micro_batches = 2"],
    ],
    ids=["mesh", "micro-batches"],
)
def test_eight_devices_have_the_choices_of_one(flags, first, tmp_path, more):
    replayed = trained(flags, tmp_path / "replayed", *more, replay=first)
    assert share_of_equal(recorded(replayed), recorded(first)) == 1


def test_another_batch_is_refused_with_both_digests(flags, first, tmp_path):
    with pytest.raises(UserError, match=r"step 1 has a batch with the digest \d+, and .* \d+; "):
        trained(flags, tmp_path, "--gin_param=step.seed = 7", record=False, replay=first)
