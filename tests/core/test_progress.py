"""Tests the progress of long work: amounts, rates and times left of its stages."""

from unittest import mock

from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import progress
from lingvo_gshard.core.progress import SILENT, PartProgress, Stage, duration
from tests.told import Told


def described(*updates, unit="rows", total=None):
    """Returns the words of a stage after updates (seconds since its begin, done, share)."""
    clock = mock.Mock(return_value=0.0)
    with mock.patch.object(progress.time, "monotonic", clock):
        stage = Stage("Reading", unit, total)
        for seconds, done, *share in updates:
            clock.return_value = seconds
            stage.update(done, *share)
        return stage.describe()


class ProgressTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ({"unit": ""}, (0,), "Reading: 4 s so far"),
        ({}, (2000,), "Reading: 2,000 rows  500 rows/s"),
        ({"total": 200}, (50,), "Reading: 50/200 rows  12 rows/s"),
        ({"total": 200}, (200,), "Reading: 200/200 rows  50 rows/s  in 4 s"),
        ({"total": 200}, (0,), "Reading: 0/200 rows  0 rows/s"),
    )
    def test_a_stage_has_its_amount_and_its_rate(self, given, update, words):
        self.assertEqual(described((4.0, *update), **given), words)

    @parameterized.parameters(
        # A minute of compilation is in the first update.
        (((61.0, 10), (63.0, 50)), 250, "Reading: 50/250 rows  20 rows/s  10 s left"),
        (((1.0, 100, 0.1), (3.0, 200, 0.5)), None, "Reading: 200 rows  50 rows/s  2 s left"),
        (((61.0, 10), (65.0, 250)), 250, "Reading: 250/250 rows  4 rows/s  in 1 min 05 s"),
        (((61.0, 10), (65.0, 10)), 250, "Reading: 10/250 rows  0 rows/s"),
    )
    def test_the_time_left_is_that_of_the_rate_after_the_first_update(self, updates, total, words):
        self.assertEqual(described(*updates, total=total), words)

    @parameterized.parameters(
        (0.4, "0 s"),
        (59.4, "59 s"),
        (200, "3 min 20 s"),
        (3600, "1 h 00 min"),
        (7500, "2 h 05 min"),
    )
    def test_durations_are_formatted(self, seconds, words):
        self.assertEqual(duration(seconds), words)

    def test_a_part_adds_what_was_done_before_it(self):
        told = Told()
        for before in (0, 30):
            part = PartProgress(told, before)
            part.update(10)
            part.update(30)
        self.assertEqual(told.done, [10, 30, 40, 60])

    def test_silent_progress_takes_everything(self):
        SILENT.begin("Reading", "rows", 3)
        SILENT.update(1, 0.5)
        with SILENT.within("Compiling"):
            SILENT.say("a line")
        SILENT.close()


if __name__ == "__main__":
    testing.main()
