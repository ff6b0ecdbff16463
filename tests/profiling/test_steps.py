# tests: wings/profiling/timeline.py
"""Tests the texts that say which steps to profile."""

import pytest

from lingvo_gshard.wings.profiling import timeline
from lingvo_gshard.wings.profiling.timeline import StepRange


@pytest.mark.parametrize(("text", "first", "last"), [("20:23", 20, 23), ("1:1", 1, 1), ("7", 7, 7)])
def test_first_and_last_step_are_included(text, first, last):
    assert timeline.parse(text) == (first, last)
    assert timeline.parse(text).count == len(range(first, last + 1))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ten", "expected the first and the last step to profile, such as 20:23"),
        ("20-23", "expected the first and the last step to profile, such as 20:23"),
        ("", "expected the first and the last step to profile, such as 20:23"),
        ("0:3", "steps are numbered from 1, and the first one comes first, such as 1:3"),
        ("23:20", "steps are numbered from 1, and the first one comes first, such as 20:23"),
    ],
)
def test_wrong_text(text, reason):
    with pytest.raises(ValueError) as error:
        timeline.parse(text)
    assert str(error.value) == f"`profile_steps={text}`: {reason}"


def test_steps_after_the_end():
    timeline.check_within(StepRange(20, 23), 23)
    with pytest.raises(ValueError, match=r"^`profile_steps=20:23`: the run ends with step 22\. "):
        timeline.check_within(StepRange(20, 23), 22)


def test_steps_that_were_taken_already():
    timeline.check_not_taken(StepRange(20, 23), 20)
    with pytest.raises(ValueError, match=r"resumes with step 31\. .* such as 32:35$"):
        timeline.check_not_taken(StepRange(20, 23), 31)
