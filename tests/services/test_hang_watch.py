"""Tests that hangs are noticed, and nothing else; and that the stuck process and line are named."""

import concurrent.futures
import queue
import re
import threading
import time

import pytest

from lingvo_gshard.runtime import compilations
from lingvo_gshard.training.run.options import RunOptions
from lingvo_gshard.wings.services import hang_watch
from lingvo_gshard.wings.services.hang_watch import HangWatch
from tests.services import stuck
from tests.tools.train.train_processes import run_in_two, start

_EXPERIMENT = "--experiment=tests.services.stuck.experiment"


class Lifeline:
    """Records what is reported."""

    def __init__(self):
        self.reports = queue.Queue()

    def answer_with(self, take_snapshot):
        self.take_snapshot = take_snapshot

    def report_hang(self, words):
        self.at_report = self.take_snapshot()
        self.reports.put(words)

    def snapshot(self):
        """Takes a snapshot in another thread, as the watch does."""
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(self.take_snapshot).result()


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr(hang_watch, "_POLL_SECONDS", 0.05)
    lifeline = Lifeline()
    watch = HangWatch(RunOptions.params().set(hang_factor=3.0, hang_seconds=0.4), lifeline)
    yield watch, lifeline
    watch.at_end()


def take_steps(watch, first, last, seconds=0.0):
    for step in range(first, last + 1):
        watch.before_input(step)
        watch.before_step(step, {})
        time.sleep(seconds)
        watch.before_result(step)
        watch.after_step(step, {})


def test_a_step_that_does_not_end_is_reported_with_its_line(watched):
    watch, lifeline = watched
    take_steps(watch, 1, 3)
    watch.before_input(4)
    words = lifeline.reports.get(timeout=10)
    assert re.fullmatch(r"no step has ended for \d+ s \(the median step takes \S+ s\)", words)
    snapshot = lifeline.snapshot()
    assert (snapshot.place, snapshot.is_busy) == ((4, 0), False)
    assert snapshot.doing == "waits for the batch of step 4"
    assert re.fullmatch(rf"{re.escape(__file__)}:\d+ \(snapshot\)", snapshot.line)
    assert snapshot.stacks.startswith("Thread MainThread:")


def test_the_line_is_that_of_the_thread_that_makes_batches(watched):
    watch, lifeline = watched
    is_over = threading.Event()

    def blocks():
        is_over.wait()

    waiting = queue.Queue()
    for name, target in (("1", waiting.get), ("2", blocks)):
        name = f"grain-thread-prefetch-{name}"
        threading.Thread(target=target, name=name, daemon=True).start()
    watch.before_input(1)
    assert lifeline.snapshot().line.endswith("(blocks)")
    watch.before_step(1, {})
    assert lifeline.snapshot().line.endswith("(snapshot)")
    is_over.set()
    waiting.put(None)


def test_other_work_compilations_and_first_steps_are_no_hangs(watched):
    watch, lifeline = watched
    watch.before_input(1)
    time.sleep(0.6)
    take_steps(watch, 1, 3)
    watch.before_other_work("evaluates")
    time.sleep(0.6)
    assert lifeline.snapshot().is_busy and lifeline.snapshot().doing == "evaluates"
    take_steps(watch, 4, 5)
    with compilations.compiling():
        time.sleep(0.6)
        assert lifeline.snapshot().doing == "compiles"
    take_steps(watch, 6, 7)
    assert lifeline.reports.empty()


def test_a_save_has_a_limit_of_its_own(watched):
    watch, lifeline = watched
    take_steps(watch, 1, 3)
    watch.before_other_work("saves a checkpoint", 2.0)
    time.sleep(0.6)
    assert lifeline.reports.empty() and lifeline.snapshot().is_busy
    words = lifeline.reports.get(timeout=10)
    assert re.fullmatch(r"the run saves a checkpoint for \d+ s \(the limit is 2 s\)", words)
    assert not lifeline.at_report.is_busy
    take_steps(watch, 4, 5)
    assert lifeline.snapshot().doing == "records step 5"


def test_the_limit_follows_the_median_step(watched):
    watch, lifeline = watched
    take_steps(watch, 1, 5, seconds=0.3)
    assert 0.9 <= watch.limit < 2.0
    watch.before_input(6)
    time.sleep(0.6)
    assert lifeline.reports.empty()


def test_a_factor_of_zero_watches_nothing():
    count = threading.active_count()
    HangWatch(RunOptions.params().set(hang_factor=0.0), Lifeline())
    assert threading.active_count() == count


def assert_names_the_line(output, logdir, who):
    line = f"{stuck.__file__}:{stuck.stuck_line()} (wait_for_a_disk)"
    assert f"{who} is stuck: it waits for the batch of step 6, at {line}; no step has" in output
    (file,) = logdir.glob("hang-*.txt")
    assert f"; {file} has the stacks of all threads; continue with the same command" in output
    assert "time.sleep(60)  # stuck here" in file.read_text()


@pytest.mark.slow
def test_a_stuck_input_ends_the_run_and_is_named(tmp_path):
    process = start([_EXPERIMENT, f"--logdir={tmp_path}"], devices=1)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert_names_the_line(output, tmp_path, "training")
    assert "(last checkpoint: step 4)" in output


@pytest.mark.slow
def test_the_stuck_one_of_two_processes_is_named_by_both(tmp_path):
    ended = run_in_two([_EXPERIMENT, f"--logdir={tmp_path}", "--mesh=data=8", "--strategy=fsdp"])
    for code, output in ended:
        assert code == 1
        assert_names_the_line(output, tmp_path, "process 1 of 2")
    (file,) = tmp_path.glob("hang-*.txt")
    assert "Process 0 of 2: it " in file.read_text()
