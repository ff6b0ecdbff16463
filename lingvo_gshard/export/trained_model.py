"""TrainedModel: what an export reads of a run."""

from __future__ import annotations

import dataclasses

import numpy as np

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.data.input import Input
from lingvo_gshard.tasks.task import Task


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """A trained model on the host.

    Attributes:
      params: the experiment.
      step: the step of the checkpoint.
      task: the model.
      specs: the tree of the weights' VariableSpec.
      theta: the weights that evaluation uses, NumPy arrays in the dtypes of `specs`.
      averaged: whether these are averages over steps.
      input: the run's input, with the vocabularies of the checkpoint.
    """

    params: Params
    step: int
    task: Task
    specs: NestedMap
    theta: NestedMap
    averaged: bool
    input: Input

    def weights(self) -> list[tuple[VariableSpec, np.ndarray]]:
        """Returns the declaration and the value of each weight."""
        return list(zip(self.specs.flatten(), self.theta.flatten(), strict=True))

    @property
    def nbytes(self) -> int:
        """The size of all weights in bytes."""
        return sum(value.nbytes for _, value in self.weights())
