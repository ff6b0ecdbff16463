"""Checks that errors of the public API name arguments instead of flags."""

import pytest

from lingvo_gshard.api.errors import ArgumentError, names_arguments


@names_arguments
def fail(message):
    raise ValueError(message)


@pytest.mark.parametrize(
    ("below", "expected"),
    [
        ("--mesh=data=8 needs --runtime=spmd", "mesh=data=8 needs runtime=spmd"),
        ("--gin_param 'a = b': unknown name", "settings 'a = b': unknown name"),
        (
            "--logdir=x: none. Train one first: gshard-train --experiment=NAME --logdir=x",
            "logdir=x: none. Train one first: gshard-train --experiment=NAME --logdir=x",
        ),
        ("trainer.steps is 0", "trainer.steps is 0"),
    ],
)
def test_flags_become_arguments(below, expected):
    with pytest.raises(ArgumentError) as caught:
        fail(below)
    assert str(caught.value) == expected
    assert caught.value.on_command_line == below


def test_an_error_is_rewritten_once():
    with pytest.raises(ArgumentError) as caught:
        names_arguments(fail)("--mesh is empty")
    assert caught.value.on_command_line == "--mesh is empty"
