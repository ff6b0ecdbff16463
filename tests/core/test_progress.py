"""Tests the progress of long work: amounts, rates and times left of its stages."""

from unittest import mock

from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import progress
from lingvo_gshard.core.progress import SILENT, PartProgress, Stage, duration
from tests.told import Told


def described(done, share=None, unit="rows", total=None, seconds=4.0):
    """Returns the words of a stage that began some seconds ago."""
    with mock.patch.object(progress.time, "monotonic", return_value=0.0):
        stage = Stage("Reading", unit, total)
    with mock.patch.object(progress.time, "monotonic", return_value=seconds):
        stage.update(done, share)
        return stage.describe()


class ProgressTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ({"done": 0, "unit": ""}, "Reading: 4 s so far"),
        ({"done": 2000}, "Reading: 2,000 rows  500 rows/s"),
        ({"done": 2000, "share": 0.25}, "Reading: 2,000 rows  500 rows/s  12 s left"),
        ({"done": 50, "total": 200}, "Reading: 50/200 rows  12 rows/s  12 s left"),
        ({"done": 200, "total": 200}, "Reading: 200/200 rows  50 rows/s  in 4 s"),
        ({"done": 0, "total": 200}, "Reading: 0/200 rows  0 rows/s"),
    )
    def test_a_stage_has_its_amount_its_rate_and_the_time_left(self, given, words):
        self.assertEqual(described(**given), words)

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
