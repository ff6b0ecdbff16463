"""Tests flags that are paths of hyperparameters."""

import pytest

from lingvo_gshard.core import registry
from lingvo_gshard.tools.flags.plain_flags import as_settings
from lingvo_gshard.wings.gin.binding import apply_gin


@pytest.mark.parametrize(
    ("argument", "path", "value"),
    [
        ("--input.batch_rows=8", "input.batch_rows", 8),
        ("-input.batch_rows=8", "input.batch_rows", 8),
        ("--step.schedule.learning_rate=1e-3", "step.schedule.learning_rate", 1e-3),
        ("--schedule.learning_rate=2", "step.schedule.learning_rate", 2.0),
        ("--step.precision=bfloat16", "step.precision", "bfloat16"),
        ("--step.precision='bfloat16'", "step.precision", "bfloat16"),
        ("--sharding.mesh=data=4,model=2", "sharding.mesh", "data=4,model=2"),
        ("--input.languages=('de', 'es')", "input.languages", ("de", "es")),
        ("--input.languages=de", "input.languages", ("de",)),
        ("--input.vocabulary.joint=false", "input.vocabulary.joint", False),
        ("--sharding.strategy=", "sharding.strategy", ""),
    ],
)
def test_a_path_is_a_flag(argument, path, value):
    (setting,) = as_settings([argument])
    assert setting.startswith("--gin_param=")
    params = registry.get("translation.quickstart")
    changed = apply_gin(params, [], [setting.removeprefix("--gin_param=")]).get(path)
    assert changed == value and type(changed) is type(value)


def test_the_value_may_follow_a_space():
    given = ["gshard-train", "--steps", "3", "--step.clip_norm", "2", "--loss.scale", "--logdir=a"]
    assert as_settings(given) == [
        *("gshard-train", "--steps", "3", "--gin_param=step.clip_norm = 2"),
        *("--gin_param=loss.scale = ''", "--logdir=a"),
    ]


@pytest.mark.parametrize("argument", ["--mesh=data=4", "--json=a.b.json", "a.b=3", "--a..b=3"])
def test_other_arguments_stay(argument):
    assert as_settings([argument]) == [argument]
