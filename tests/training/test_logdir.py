# tests: training/run/logdir.py, core/config/params_text.py
"""Checks that a log directory rejects another run and that params.txt restores the Params."""

import os

import hypothesis
import hypothesis.strategies as st
import pytest

from lingvo_gshard.api.experiments import experiment
from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.config.params_text import experiment_from_text
from lingvo_gshard.core.config.registry import Experiment
from lingvo_gshard.training.run.logdir import Logdir
from lingvo_gshard.training.step import schedules
from tests import tiny


def claim(logdir, params) -> None:
    """Claims a directory and writes its Params, as a run that goes on does."""
    with logdir.claim(params):
        logdir.write_params(params)


def claimed(tmp_path, params=None) -> Logdir:
    logdir = Logdir(tmp_path / "run")
    claim(logdir, params or tiny.experiment_params())
    return logdir


def pretend_checkpoint(logdir):
    (logdir.checkpoints / "100").mkdir(parents=True)


def test_new_directory_gets_params_txt(tmp_path):
    logdir = claimed(tmp_path)
    assert logdir.params.read_text() == tiny.experiment_params().to_text()
    assert not logdir.read_params().diff(tiny.experiment_params())


def test_same_params_resume(tmp_path):
    logdir = claimed(tmp_path)
    pretend_checkpoint(logdir)
    claim(logdir, tiny.experiment_params())


def test_other_params_are_rejected_by_path(tmp_path):
    logdir = claimed(tmp_path)
    pretend_checkpoint(logdir)
    other = tiny.experiment_params()
    other.task.hidden.dropout = 0.5
    other.step.seed = 3
    other.step.schedule = schedules.Constant.params()
    with pytest.raises(ValueError, match="holds a run of test.tiny with other Params") as caught:
        claim(logdir, other)
    assert "task.hidden.dropout: 0.1 there, 0.5 here" in str(caught.value)
    assert "step.seed: 1 there, 3 here" in str(caught.value)
    assert "step.schedule.cls: lingvo_gshard.training.step.schedules.Linear" in str(caught.value)
    assert logdir.read_params().step.seed == 1


def test_another_experiment_is_rejected(tmp_path):
    logdir = claimed(tmp_path)
    pretend_checkpoint(logdir)
    with pytest.raises(ValueError, match="name: 'test.tiny' there, 'test.other' here"):
        claim(logdir, tiny.experiment_params().set(name="test.other"))


def test_length_and_verbosity_may_differ(tmp_path):
    logdir = claimed(tmp_path)
    pretend_checkpoint(logdir)
    other = tiny.experiment_params()
    other.run.set(steps=99, log_every_steps=1, checkpoint_every_steps=2, keep_checkpoints=9)
    claim(logdir, other)
    assert logdir.read_params().run.steps == 99


def test_watching_routers_and_prefetching_may_differ(tmp_path):
    params = experiment("translation.quickstart")
    logdir = Logdir(tmp_path)
    claim(logdir, params)
    pretend_checkpoint(logdir)
    other = params.copy()
    other.run.routers.set(every_steps=1, window=2, collapse=0.9)
    other.input.prefetch_batches = 2
    other.input.vocabulary.cache_directory = "elsewhere"
    claim(logdir, other)


def test_sharding_may_differ(tmp_path):
    logdir = claimed(tmp_path)
    pretend_checkpoint(logdir)
    other = tiny.experiment_params()
    other.sharding.set(mesh="data=2", strategy="fsdp", overrides={"encoder": "M->none"})
    claim(logdir, other)
    assert logdir.read_params().sharding.overrides == {"encoder": "M->none"}


def test_run_without_a_checkpoint_may_be_overwritten(tmp_path):
    logdir = claimed(tmp_path)
    claim(logdir, tiny.experiment_params().set(name="test.other"))
    assert logdir.read_params().name == "test.other"


def test_unwritable_directory_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file` is a file; a directory was expected"):
        claim(Logdir(tmp_path / "file"), tiny.experiment_params())
    with pytest.raises(ValueError, match="file/run` cannot be written: Not a directory"):
        claim(Logdir(tmp_path / "file" / "run"), tiny.experiment_params())


def test_empty_directory_has_no_run(tmp_path):
    with pytest.raises(ValueError, match="holds no run: it has no params.txt"):
        Logdir(tmp_path).read_params()


def test_invalid_params_txt_names_its_line(tmp_path):
    logdir = claimed(tmp_path)
    lines = logdir.params.read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if line.startswith("run.steps"))
    for line in ("nonsense", "step.stepps : 3", "run.steps : <object>"):
        lines[number - 1] = line
        logdir.params.write_text("\n".join(lines))
        with pytest.raises(ValueError, match=rf"params\.txt: line {number}: "):
            logdir.read_params()


def copy_in_checkpoint(logdir, step, text):
    path = logdir.checkpoints / str(step) / "run" / "params.txt"
    path.parent.mkdir(parents=True)
    path.write_text(text)


@pytest.mark.parametrize("damage", ["removed", "emptied", "cut", "cut at a line", "not text"])
def test_copy_in_a_checkpoint_replaces_damaged_params(tmp_path, damage):
    logdir = claimed(tmp_path)
    text = logdir.params.read_text()
    copy_in_checkpoint(logdir, 4, text)
    copy_in_checkpoint(logdir, 8, text[: len(text) // 2])
    if damage == "removed":
        logdir.params.unlink()
    else:
        half = text[: text.index("\n", len(text) // 2) + 1]
        damaged = {"emptied": "", "cut": text[:-3], "cut at a line": half, "not text": "\0\udcff"}
        logdir.params.write_bytes(damaged[damage].encode(errors="surrogateescape"))
    said = []
    assert not logdir.read_params(said.append).diff(tiny.experiment_params())
    assert len(said) == 1 and said[0].endswith("; using the copy in the checkpoint of step 4")
    claim(logdir, tiny.experiment_params())
    assert logdir.params.read_text() == text
    said.clear()
    logdir.read_params(said.append)
    assert not said


def test_damaged_params_without_a_copy_are_an_error(tmp_path):
    logdir = claimed(tmp_path)
    logdir.params.write_text("")
    with pytest.raises(ValueError, match="params.txt is cut off: it does not end with task"):
        logdir.read_params()


def test_claimed_directory_is_locked(tmp_path):
    logdir = Logdir(tmp_path)
    with logdir.claim(tiny.experiment_params()):
        with pytest.raises(ValueError, match=f"`logdir={tmp_path}` is in use by process .*Stop "):
            claim(Logdir(tmp_path), tiny.experiment_params())
        logdir.check_lock()
    with pytest.raises(ZeroDivisionError), logdir.claim(tiny.experiment_params()):
        raise ZeroDivisionError
    assert sorted(os.listdir(tmp_path)) == ["params.txt"]


def test_refused_run_leaves_params_and_no_lock(tmp_path):
    logdir = claimed(tmp_path)
    pretend_checkpoint(logdir)
    before = logdir.params.read_text()
    with pytest.raises(ValueError, match="with other Params"):
        claim(logdir, tiny.experiment_params().set(name="test.other"))
    assert logdir.params.read_text() == before
    assert sorted(os.listdir(logdir.path)) == ["checkpoints", "params.txt"]


class Leaf(Configurable):
    """A leaf of the Params tree in the test below."""

    @classmethod
    def params(cls) -> Params:
        p = Params(cls)
        p.define("value", None, "Anything.")
        p.define("children", [], "Leaves.")
        return p


_values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
    st.text(), st.lists(st.integers()), st.tuples(st.text(), st.integers()),
    st.dictionaries(st.text(), st.integers()), st.sampled_from([schedules.Linear, experiment]),
)  # fmt: skip
_leaves = st.recursive(
    st.builds(lambda value: Leaf.params().set(value=value), _values),
    lambda children: st.builds(
        lambda value, below: Leaf.params().set(value=value, children=below),
        _values,
        st.lists(children, max_size=3),
    ),
    max_leaves=6,
)


@hypothesis.given(_leaves, _leaves)
def test_every_experiment_round_trips_through_text(task, input_):
    params = Experiment.params().set(name="test.tree", task=task, input=input_)
    assert not experiment_from_text(params.to_text()).diff(params)


def test_last_step_is_that_of_the_newest_complete_checkpoint(tmp_path):
    logdir = Logdir(tmp_path)
    assert logdir.last_step is None and not logdir.has_checkpoints()
    for name in ("8", "16", "24.orbax-checkpoint-tmp"):
        (logdir.checkpoints / name).mkdir(parents=True)
    assert logdir.last_step == 16 and logdir.has_checkpoints()
