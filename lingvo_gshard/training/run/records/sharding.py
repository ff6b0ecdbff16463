"""The storage of a run's weights and moments on its devices, as a file in its directory."""

from __future__ import annotations

import pathlib

import msgspec

from lingvo_gshard.core.files import json_text
from lingvo_gshard.core.files.atomic import write_atomically
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.sharding.reports.listing import weight_rows
from lingvo_gshard.training.step.trainer import Trainer

# The file in a log directory that describes the newest launch.
SHARDING_FILE = "sharding.json"


class TensorSharding(msgspec.Struct, frozen=True):
    """The storage of a weight or a moment.

    Attributes:
      path: path of the weight.
      kind: "weights" or "moments".
      layout: letters of the tensor.
      shape: shape of the whole tensor.
      dtype: name of its type.
      split: the split as text, such as "E over data (8)", or "replicated".
      bytes: size of the whole tensor.
      bytes_per_device: size of one device's part.
    """

    path: str
    kind: str
    layout: str
    shape: tuple[int, ...]
    dtype: str
    split: str
    bytes: int
    bytes_per_device: int


class Sharding(msgspec.Struct, frozen=True):
    """The storage of all weights and moments of a run.

    Attributes:
      mesh: axes and sizes, such as "data=4,model=2"; "" for one device.
      devices: number of devices.
      strategy: name of the strategy; "" for one device.
      table: the strategy's rules as text.
      tensors: the weights and moments.
    """

    mesh: str
    devices: int
    strategy: str
    table: str
    tensors: list[TensorSharding]


def of_trainer(trainer: Trainer, partitioning: Partitioning | None) -> Sharding:
    """Returns how a trainer's state is stored.

    Args:
      trainer: the trainer.
      partitioning: how it is split; None for one device.
    """
    one_device = Mesh((("data", 1),))
    given = partitioning or Partitioning.make(one_device, "replicated")
    specs = trainer.state_specs()
    tensors = [
        TensorSharding(
            row.path,
            kind,
            row.layout,
            row.shape,
            row.dtype,
            row.split,
            row.bytes,
            row.bytes_per_device,
        )
        for kind in ("weights", "moments")
        for row in weight_rows(specs["theta" if kind == "weights" else kind], given, kind)
    ]
    if partitioning is None:
        return Sharding("", 1, "", "", tensors)
    mesh, strategy = partitioning.mesh, partitioning.strategy
    return Sharding(str(mesh), mesh.size, strategy.name, strategy.to_text(), tensors)


def write(logdir: pathlib.Path, sharding: Sharding) -> None:
    """Replaces sharding.json. Raises OSError if it cannot be written."""
    write_atomically(str(logdir / SHARDING_FILE), msgspec.json.encode(sharding))


def read(logdir: pathlib.Path) -> Sharding | None:
    """Returns how a run is stored; None if that was not recorded, or the file is damaged."""
    try:
        return json_text.decode((logdir / SHARDING_FILE).read_bytes(), Sharding)
    except (OSError, msgspec.DecodeError):
        return None
