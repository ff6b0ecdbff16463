# tests: wings/services/compilations.py, runtime/compilations.py
"""Tests what a run says about its compilations, and that it names the input that caused one."""

import json
import types

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.runtime.compilations import Compilation, inputs_of
from lingvo_gshard.wings.services.compilations import CompilationLog
from tests import tiny
from tests.training.test_loop import Run


def batch(rows, length, dtype="int32"):
    return {"ids": np.zeros((rows, length), dtype), "weights": np.zeros((rows,), "float32")}


def compilation(*shape, function="train", **options):
    return Compilation(function, inputs_of(batch(*shape, **options)), 1.0, 0.25, 2.0)


def specs(rows, length):
    return {
        "ids": tf.TensorSpec((rows, length), tf.int32),
        "weights": tf.TensorSpec((rows,), tf.float32),
    }


def watch_of(*declared):
    """Returns the log of a run whose input declares these batches."""
    input_ = types.SimpleNamespace(p=None, declared_batches=lambda p: declared)
    return CompilationLog(types.SimpleNamespace(input_=input_))


@pytest.fixture
def watch():
    return watch_of(specs(8, 16), specs(4, 32))


def test_declared_buckets_do_not_warn(watch):
    for function in ("train", "eval"):
        assert watch.add(1, compilation(8, 16, function=function)) == ""
        assert watch.add(2, compilation(4, 32, function=function)) == ""


def test_a_shape_that_is_not_declared_is_named(watch):
    watch.add(1, compilation(8, 16))
    watch.add(2, compilation(4, 32))
    warning = watch.add(1234, compilation(8, 15))
    assert warning.startswith(
        "Warning: step 1,234: the train step was compiled again, in 3.2 s: input ids changed from "
        "int32[8,16] to int32[8,15]. "
    )
    # The nearest earlier program differs in the one input.
    assert "weights" not in warning


def test_a_type_that_changed_is_named(watch):
    watch.add(1, compilation(8, 16))
    warning = watch.add(2, compilation(8, 16, dtype="int64"))
    assert "input ids changed from int32[8,16] to int64[8,16]." in warning


def test_features_that_come_and_go_are_named(watch):
    watch.add(1, compilation(8, 16))
    other = batch(8, 16)
    other["mask"] = other.pop("weights")
    warning = watch.add(2, Compilation("train", inputs_of(other), 1.0, 0.0, 1.0))
    assert "input mask, float32[8], is new, input weights is missing." in warning


def test_a_first_program_of_another_shape_makes_the_declared_one_the_second(watch):
    assert watch.add(1, compilation(3, 16)) == ""
    assert "from int32[3,16] to int32[8,16]" in watch.add(2, compilation(8, 16))
    assert watch.add(3, compilation(4, 32)) == ""


def test_any_size_may_be_declared():
    watch = watch_of(specs(None, 16))
    assert [watch.add(1, compilation(rows, 16)) for rows in (8, 3, 5)] == [""] * 3
    assert watch.add(1, compilation(8, 17))


def test_programs_of_equal_inputs_and_of_functions_do_not_warn(watch):
    # Each worker of local updates has a training step.
    assert [watch.add(1, compilation(8, 16)) for _ in range(3)] == [""] * 3
    lengths = (5, 6, 7)
    assert [watch.add(1, compilation(8, n, function="function")) for n in lengths] == [""] * 3


def test_summary_adds_up_and_counts_the_cache(watch):
    for index in range(9):
        watch.add(index, compilation(8, 16 + index))
    watch.add(1, Compilation("eval", {}, 0.5, 0.5, 0.1, is_cached=True))
    assert watch.totals() == [
        "compiled train: 9 programs in 29.2 s (tracing 9.0 s, lowering 2.2 s, compiling 18.0 s; "
        "0 from the cache)",
        "compiled eval: 1 program in 1.1 s (tracing 0.5 s, lowering 0.5 s, compiling 0.1 s; "
        "1 from the cache)",
        "Warning: 3 more compilations of other shapes or types",
    ]


class ShorterBatches(tiny.TinyBatches):
    """The batches of TinyBatches, of which each third has half of the rows."""

    def __next__(self):
        index, rows = self._index, self._p.rows
        found = super().__next__()
        return {k: x[: rows // 2] for k, x in found.items()} if index % 3 == 2 else found


class ShorterInput(tiny.TinyInput):
    def train_batches(self, seed):
        return ShorterBatches(self.p, seed)


class BucketedInput(ShorterInput):
    @classmethod
    def declared_batches(cls, params):
        small = params.copy().set(rows=params.rows // 2)
        return [cls.batch_specs(params), cls.batch_specs(small)]


def run_with(input_class, path):
    run = Run(path, steps=4)
    run.params.input = input_class.params()
    run.go()
    lines = (path / "compilations.jsonl").read_text().splitlines()
    return run.screen.getvalue().splitlines(), [json.loads(line) for line in lines]


def test_run_warns_of_a_batch_whose_shape_changes(tmp_path):
    lines, rows = run_with(ShorterInput, tmp_path)
    (warning,) = [line for line in lines if "compiled again" in line]
    assert warning.startswith("Warning: step 3: the train step was compiled again")
    assert "input x changed from float32[16,6] to float32[8,6]" in warning
    assert "input y changed from int32[16] to int32[8]" in warning
    assert [(row["step"], row["function"]) for row in rows] == [
        (1, "train"),
        (3, "train"),
        (4, "eval"),
    ]
    assert rows[1]["inputs"] == {"x": "float32[8,6]", "y": "int32[8]"}
    for row in rows:
        assert row["tracing"] > 0 and row["compiling"] > 0 and row["is_cached"] is False
    assert [line[:14] for line in lines[-3:-1]] == ["compiled train", "compiled eval:"]
    total = sum(row["tracing"] + row["lowering"] + row["compiling"] for row in rows[:2])
    assert f"2 programs in {total:.1f} s" in lines[-3]


def test_run_does_not_warn_of_declared_buckets(tmp_path):
    lines, rows = run_with(BucketedInput, tmp_path)
    assert [row["function"] for row in rows] == ["train", "train", "eval"]
    assert not [line for line in lines if "Warning" in line]
