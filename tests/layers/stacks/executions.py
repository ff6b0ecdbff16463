"""Params of all executions of a stack, for tests."""

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.stacks.execution import Sequential
from lingvo_gshard.wings.pipeline.pipeline import Pipeline
from lingvo_gshard.wings.repeat.loop import Repeat


def sequential(policy: str = "none", interleaved: int = 1) -> Params:
    """Returns the Params of layers compiled one by one, with a remat policy."""
    return Sequential.params().set(rematerialize=policy, interleaved=interleaved)


def loop(policy: str = "none", interleaved: int = 1) -> Params:
    """Returns the Params of a compiled loop, with a remat policy."""
    return Repeat.params().set(rematerialize=policy, interleaved=interleaved)


def pipeline(stages: int, **values: object) -> Params:
    """Returns the Params of a pipeline with options of Pipeline."""
    return Pipeline.params().set(stages=stages, **values)
