"""Tests what a watch of routers writes and tells, with steps whose choices are given."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import lingvo_gshard
from lingvo_gshard.core.token_kinds import TokenKinds
from lingvo_gshard.layers.feed_forward import FeedForward
from lingvo_gshard.training.run.logdir import Logdir
from lingvo_gshard.wings.services.routers.counts import records_of, watched_layers
from lingvo_gshard.wings.services.routers.router_records import ROUTERS_FILE, routers_of_run
from lingvo_gshard.wings.services.routers.watch import RouterWatch
from tests import tiny
from tests.runtime import tiny_translation

LAYERS = [f"{side}.layers[1].feed_forward" for side in ("encoder", "decoder")]
KINDS = TokenKinds({}, ("de", "es"), ("word", "digits"))


class Log:
    """A run that keeps what it is told, and the writer of its curves and pictures."""

    def __init__(self):
        self.lines, self.points, self.drawn, self.work = [], {}, {}, []
        self.writer = self

    def say(self, text):
        self.lines.append(text)

    def working(self, what):
        self.work.append(what)
        return contextlib.nullcontext()

    def curves(self, step, row):
        self.points[step] = row

    def pictures(self, step, found):
        self.drawn[step] = found


class Runtime:
    """Routes the tokens of each step to given experts, the same in both layers."""

    def __init__(self, choices, error=None):
        self._choices, self._error, self.watched = choices, error, []

    def measure(self, name, function, batch):
        step = int(batch["watched_step"])
        self.watched.append(step)
        if self._error:
            raise self._error
        choices = np.array(self._choices(step), np.float32)
        sums = {
            "choices": choices,
            "kept": np.minimum(choices, 6),
            "tokens": np.array([20, choices.sum(), np.minimum(choices, 6).sum()], np.float32),
            "batches": np.float32(2.0),
            "groups": np.array([4, 4 * 12, 4 * 4 * 3], np.float32),
            "positions": np.array([7, 5, 8, 0, 0], np.float32),
            "by_part": np.stack([choices - 1, np.ones_like(choices)]),
            "entropy": np.float32(30.0),
            "balance": np.float32(0.75),
            "by_language": np.stack([choices, 0 * choices]),
            "by_class": np.stack([choices - 1, np.ones_like(choices)]),
        }
        return lambda: {f"{layer}/{name}": x for layer in LAYERS for name, x in sums.items()}


class Input:
    def token_kinds(self, batch):
        return KINDS


def watch(tmp_path, runtime, log, step=0, **routers):
    settings = {"every_steps": 10, "window": 3, **routers}
    trainer = tiny_translation.trainer(num_experts=4)
    return watch_of(tmp_path, trainer, runtime, log, step, settings)


def watch_of(tmp_path, trainer, runtime, log, step, settings):
    log.params = tiny.experiment_params(steps=100)
    log.params.run.routers.set(**settings)
    log.trainer, log.runtime, log.input_ = trainer, runtime, Input()
    log.logdir, log.step = Logdir(tmp_path), step
    watching = RouterWatch(log)
    watching.go_on(None)
    return watching


def run(watching, steps):
    """Tells a watch of steps as the training loop does: a step ends after the next has begun."""
    for step in steps:
        watching.before_step(step, {})
        watching.after_step(step - 1, {})
    watching.after_step(steps[-1], {})


def uneven(step):
    """Expert 1 has no token from step 20 on."""
    return (8, 3 if step < 20 else 0, 5, 4)


def test_a_record_for_each_watched_step_and_layer(tmp_path):
    log, runtime = Log(), Runtime(uneven)
    watching = watch(tmp_path, runtime, log)
    run(watching, range(1, 46))
    assert runtime.watched == [10, 20, 30, 40]
    found = routers_of_run(tmp_path)
    assert [(r.step, r.layer) for r in found] == [(s, p) for s in (10, 20, 30, 40) for p in LAYERS]
    first = found[0]
    assert first.choices == [8, 3, 5, 4] and first.kept == [6, 3, 5, 4] and first.tokens == 20
    shares = np.array(first.choices) / 20
    np.testing.assert_allclose(first.load_entropy, -sum(s * np.log(s) for s in shares))
    np.testing.assert_allclose(first.dropped_share, 2 / 20)
    assert (first.token_entropy, first.balance_loss, first.balance_floor) == (1.5, 0.375, 1 / 16)
    assert first.balance_distance == 0.375 * 16 - 1
    assert first.by_language == {"de": [8, 3, 5, 4]}
    assert first.by_class == {"word": [7, 2, 4, 3], "digits": [1, 1, 1, 1]}
    assert (first.groups, first.group_size, first.capacity) == (4, 12, 3)
    assert first.positions == [7, 5, 8] and first.by_part == [[7, 2, 4, 3], [1, 1, 1, 1]]
    assert first.router == "Top2Router" and first.experts_per_token == 2
    assert [r.dead_since for r in found if r.layer == LAYERS[0]] == [{}, {}, {}, {1: 20}]
    warnings = [line for line in log.lines if line.startswith("Warning")]
    assert len(warnings) == 2
    assert warnings[1].startswith(f"Warning: step 40: {LAYERS[1]}: expert 1 has had no token since")


def test_curves_and_pictures(tmp_path):
    log = Log()
    watching = watch(tmp_path, Runtime(uneven), log)
    run(watching, range(1, 301))
    watching.at_end()
    assert list(log.points) == list(range(10, 301, 10))
    name = f"routers/{LAYERS[0]}"
    assert log.points[40] == {
        **{f"routers/{p}/{n}": log.points[40][f"routers/{p}/{n}"] for p in LAYERS for n in NAMES},
        f"{name}/busiest_share": 8 / 17,
        f"{name}/dead_experts": 1.0,
    }
    # Few pictures are drawn of many steps, and those of the last step always.
    assert list(log.drawn)[:10] == list(range(10, 101, 10)) and 300 in log.drawn
    assert len(log.drawn) < 25
    picture, about = log.drawn[300][f"{name}/load"]
    assert picture.shape == (4 * 16, 30 * 16, 3) and "4 experts" in about
    assert log.drawn[300][f"{name}/by_language"][1].endswith("rows from the top: de")
    assert log.drawn[300][f"{name}/by_class"][0].shape == (32, 64, 3)


NAMES = (
    "busiest_share",
    "dropped_share",
    "load_entropy",
    "token_entropy",
    "balance_distance",
    "dead_experts",
)


def test_a_resumed_run_has_the_records_and_windows_of_an_uninterrupted_one(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "resumed").mkdir()
    whole, log = Log(), Log()
    run(watch(tmp_path / "whole", Runtime(uneven), whole), range(1, 61))
    # The first part was killed five steps after its last checkpoint, at step 35.
    run(watch(tmp_path / "resumed", Runtime(uneven), Log()), range(1, 41))
    resumed = watch(tmp_path / "resumed", Runtime(uneven), log, step=35)
    run(resumed, range(36, 61))
    files = [(tmp_path / name / ROUTERS_FILE).read_bytes() for name in ("whole", "resumed")]
    assert files[0] == files[1]
    assert [x for x in log.lines if "Warning" in x] == [x for x in whole.lines if "Warning" in x]
    resumed.at_end()
    assert log.drawn[60][f"routers/{LAYERS[0]}/load"][0].shape[1] == 6 * 16


def test_missing_records_are_told(tmp_path):
    log = Log()
    watch(tmp_path, Runtime(uneven), log, step=35)
    # A run that was made from another one begins at a later step.
    assert log.lines == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    watch(tmp_path, Runtime(uneven), log, step=35)
    assert log.lines == [
        "Warning: routers.jsonl has no record of the watched steps 1 to 30; whether an expert had "
        "tokens in them is unknown"
    ]


@pytest.mark.parametrize("when", ["off", "dense"])
def test_nothing_is_watched(tmp_path, when):
    runtime = Runtime(uneven)
    settings = {"every_steps": 0 if when == "off" else 1}
    stack = {} if when == "off" else {"moe": FeedForward.params()}
    trainer = tiny_translation.trainer(stack_values=stack)
    watching = watch_of(tmp_path, trainer, runtime, Log(), 0, settings)
    run(watching, range(1, 10))
    watching.at_end()
    assert not runtime.watched and not (tmp_path / ROUTERS_FILE).exists()


def test_too_little_memory_ends_the_watching_and_not_the_training(tmp_path):
    log = Log()
    error = tf.errors.ResourceExhaustedError(None, None, "out of memory\nat length")
    runtime = Runtime(uneven, error)
    run(watch(tmp_path, runtime, log), range(1, 46))
    assert runtime.watched == [10]
    assert len(log.lines) == 1 and log.lines[0].endswith("run.routers failed: out of memory")


@pytest.mark.parametrize(
    ("name", "value"), [("every_steps", -1), ("window", 0), ("collapse", 0.0), ("collapse", 1.5)]
)
def test_values_out_of_range_are_refused_with_their_path(name, value):
    params = lingvo_gshard.experiment("translation.quickstart")
    with pytest.raises(ValueError, match=rf"^run\.routers\.{name} is {value}; expected "):
        params.set_path(f"run.routers.{name}", value)


def test_a_record_has_few_counts_of_many_languages():
    task = tiny_translation.trainer(num_experts=8).task
    names = tuple(f"l{i:03}" for i in range(600))
    table = np.arange(600, dtype=np.float32)[:, None] * np.ones(8, np.float32)
    one = np.ones(8, np.float32)
    sums = {"choices": one, "kept": one, "tokens": one[:3], "batches": one[0]}
    sums |= {"groups": one[:3], "by_part": one[None]}
    sums = {f"{LAYERS[0]}/{n}": x for n, x in {**sums, "by_language": table}.items()}
    (found,) = records_of(1, sums, watched_layers(task), TokenKinds({}, names, ("word",)))
    assert len(found.by_language) == 4096 // 8
    assert found.by_language["l599"] == [599] * 8 and "l050" not in found.by_language
    assert np.sum(list(found.by_language.values())) == table.sum()
    assert list(found.by_language)[-1] == "others" and found.balance_floor is None
