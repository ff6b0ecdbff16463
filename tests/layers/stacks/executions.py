"""Params of the ways to run the layers of a stack, for tests."""

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.stacks.pipeline import Pipeline
from lingvo_gshard.layers.stacks.repeat import Repeat
from lingvo_gshard.layers.stacks.sequential import Sequential


def sequential(policy: str = "none") -> Params:
    """Returns the Params of layers one by one, with a rematerialization policy."""
    return Sequential.params().set(rematerialize=policy)


def loop(policy: str = "none") -> Params:
    """Returns the Params of one compiled loop, with a rematerialization policy."""
    return Repeat.params().set(rematerialize=policy)


def pipeline(stages: int, **values: object) -> Params:
    """Returns the Params of a pipeline of so many stages."""
    return Pipeline.params().set(stages=stages, **values)
