"""Makes engines of models that are in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core import Device, NestedMap, Params, UserError, jax
from lingvo_gshard.data import TextIds
from lingvo_gshard.runtime import platform_of
from lingvo_gshard.sharding import Mesh, Partitioning
from lingvo_gshard.tasks import Task, TokenTask
from lingvo_gshard.wings.inference.decoding.models import model_facts
from lingvo_gshard.wings.inference.decoding.precision import TRAINED, check_precision
from lingvo_gshard.wings.inference.engine.engine import Engine
from lingvo_gshard.wings.inference.engine.shapes import EngineOptions
from lingvo_gshard.wings.inference.model_facts import ModelFacts
from lingvo_gshard.wings.inference.programs.executables import Executables
from lingvo_gshard.wings.inference.programs.maker import ONE_DEVICE, ProgramMaker, row_parts
from lingvo_gshard.wings.inference.programs.preparation import prepared_weights


def facts_of(
    task: Task, input_params: Params, length: int | None = None, text_ids: TextIds | None = None
) -> ModelFacts:
    """Returns what the host knows of a model.

    Args:
      length: number of positions of a language model's text; None takes the length of an input row.
      text_ids: the ids around a text; None takes the ids of vocabularies that were trained here.

    Raises:
      UserError: the task decodes nothing, or the model predicts no id that ends a text.
    """
    if not isinstance(task, TokenTask) or task.DECODING is None:
        raise UserError(f"{type(task).__name__}, the task of this run, decodes nothing")
    if length is None:
        input_class: Any = input_params.cls
        length = task.token_shape(input_class.batch_specs(input_params)).length
    ids = text_ids or TextIds()
    facts = model_facts(task, length, ids.before[0], ids.ends)
    # A tokenizer may have more ids than the model predicts.
    ends = tuple(end for end in facts.end_ids if end < facts.vocabulary_size)
    if not ends:
        raise UserError(
            f"the ids that end a text are {facts.end_ids}; the model predicts ids from 0 to "
            f"{facts.vocabulary_size - 1:,}"
        )
    return dataclasses.replace(facts, end_ids=ends, pad_id=ids.pad, forced_ids=ids.before[1:])


def make_engine(
    task: TokenTask,
    theta: NestedMap,
    facts: ModelFacts,
    partitioning: Partitioning | None = None,
    devices: Sequence[Device] = (),
    options: EngineOptions | None = None,
    precision: str = TRAINED,
) -> Engine:
    """Returns an engine of a model in memory. Programs are compiled when first needed.

    Args:
      theta: the model's weights, NumPy arrays or jax.Arrays.
      partitioning: the mesh and what is split over it; None for the first device of jax.
      devices: the devices of the mesh, in its order.
      precision: how weights are stored and multiplied; one of
        wings/inference/decoding/precision.py.

    Raises:
      UserError: the precision is unknown.
    """
    check_precision(precision)
    devices = devices or jax.devices()[:1]
    platform = platform_of(devices[0])
    maker = ProgramMaker(task, facts, partitioning, precision=precision, platform=platform)
    executables = Executables(maker.make, devices, parts=row_parts(partitioning))
    return Engine(facts, executables, prepared_weights(executables, theta)[1], options)


def mesh_of(partitioning: Partitioning | None, devices: Sequence[Device]) -> jax.sharding.Mesh:
    """Returns the mesh of devices that decoding programs run on."""
    mesh = partitioning.mesh if partitioning else Mesh.parse(ONE_DEVICE)
    return jax.sharding.Mesh(mesh.arrange(devices), mesh.names)
