"""Makes an experiment small enough to verify: sizes by letter, their divisibility kept."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from lingvo_gshard.core import Params, option
from lingvo_gshard.sharding import HARDWARE, Mesh, Partitioning, PartitioningOptions
from lingvo_gshard.training import experiments
from lingvo_gshard.wings.local_updates.workers import with_rows_over_workers
from lingvo_gshard.wings.optimizers.local_updates import AXIS


@dataclasses.dataclass(frozen=True)
class _Limit:
    """Sizes of a letter above `most` are made smaller, to about `wanted`."""

    most: int
    wanted: int


# The quickstarts are below these limits, so that they stay as they are.
_LIMITS = {
    "B": _Limit(32, 8),
    "D": _Limit(64, 16),
    "E": _Limit(16, 8),
    "H": _Limit(1024, 128),
    "L": _Limit(96, 32),
    "M": _Limit(256, 64),
    "N": _Limit(8, 4),
    "S": _Limit(256, 32),
    "V": _Limit(8192, 256),
}
# Attention over shorter rows uses no kernels.
_LIMITS_WITH_KERNELS = {**_LIMITS, "L": _Limit(128, 128)}
# Last names of the paths in the Params that are a letter's sizes.
_NAMES = {
    "B": "batch_rows rows",
    "D": "head_dim",
    "E": "num_experts",
    "H": "hidden_dim",
    "L": "length source_length target_length",
    "M": "model_dim",
    "N": "num_heads num_key_value_heads num_kv_heads",
    "S": "group_size",
    "V": "size target_size vocabulary_size source_vocabulary_size target_vocabulary_size",
}
_LETTERS = {name: letter for letter, names in _NAMES.items() for name in names.split()}
_TABLES = ("activations", "weights", "moments")
_LAYERS = "num_layers"
# Stacks are at most as deep, if their layers can be repeated so few times.
_MOST_LAYERS = 4


@dataclasses.dataclass(frozen=True)
class VerifyOptions(PartitioningOptions):
    """Options for the verification of an experiment."""

    tolerance: float = option(
        1e-9,
        "Largest difference that counts as equal, relative to the largest value of the tensor.",
        minimum=0,
    )
    seed: int = option(1, "Seed of the weights and of all random numbers of the step.", minimum=0)
    shrink: bool = option(True, "Makes large sizes small.")
    dropout: bool = option(True, "Keeps dropout; otherwise all rates are 0.")
    max_devices: int = option(
        16, "Largest number of devices; a larger mesh is made smaller.", minimum=1
    )
    kernels: str | None = option(
        None,
        "Platform whose kernels are used, computed step by step: tpu or cuda. None by default.",
        choices=HARDWARE,
    )


@dataclasses.dataclass(frozen=True)
class Shrunk:
    """A small experiment, with notes on what differs in it, and on what was switched off."""

    params: Params
    mesh: Mesh
    notes: tuple[str, ...]
    not_verified: tuple[str, ...] = ()


def shrink(experiment: Params, partitioning: Partitioning, options: VerifyOptions) -> Shrunk:
    """Returns an experiment of the same layers and layouts with smaller sizes.

    A size that the mesh divides is divided by the smaller mesh, too; another one is not. Sizes
    that were equal stay equal.
    """
    params, notes, not_verified = _comparable(experiment)
    if params.step.local_updates.every:
        over_workers = with_rows_over_workers(partitioning.strategy)
        partitioning = dataclasses.replace(partitioning, strategy=over_workers)
    if not options.dropout:
        params, off = without_dropout(params)
        notes += off
    mesh = smaller_mesh(partitioning.mesh, options.max_devices)
    if mesh != partitioning.mesh:
        notes.append(
            f"mesh {mesh} instead of {partitioning.mesh}: the same axes on fewer devices "
            f"(`max_devices={options.max_devices}`)"
        )
    if options.shrink:
        small = dataclasses.replace(partitioning, mesh=mesh)
        workers = mesh.axis_size(AXIS) if params.step.local_updates.every else 1
        limits = _LIMITS_WITH_KERNELS if options.kernels else _LIMITS
        for changes in (
            *_smaller_sizes(params, partitioning, small, workers, limits),
            *_fewer_layers(params),
        ):
            params, made = _changed(params, changes)
            notes += made
    return Shrunk(params, mesh, tuple(notes), tuple(not_verified))


def smaller_mesh(mesh: Mesh, most: int) -> Mesh:
    """Returns a mesh with smaller axes and at most `most` devices, if the axes can be divided so.

    The new size of an axis divides the old size. An axis of more than one device keeps more than
    one.
    """
    sizes = dict(mesh.axes)
    while math.prod(sizes.values()) > most:
        name = max(sizes, key=lambda axis: sizes[axis])
        factor = next(f for f in range(2, sizes[name] + 1) if sizes[name] % f == 0)
        if factor == sizes[name]:
            break
        sizes[name] //= factor
    return Mesh(tuple(sizes.items()), mesh.device_order)


def without_dropout(params: Params) -> tuple[Params, list[str]]:
    """Returns Params without dropout, and a note that says so."""
    params = params.copy()
    rates = {path: value for path, value in params.leaves() if "dropout" in path}
    paths = [path for path, value in rates.items() if isinstance(value, float) and value]
    for path in paths:
        params.set_path(path, 0.0)
    return params, [f"dropout off: {', '.join(paths)}"] if paths else []


def _comparable(experiment: Params) -> tuple[Params, list[str], list[str]]:
    """Returns Params that compare, notes on rounding, and notes on what is not verified."""
    params, notes, not_verified = experiment.copy(), [], []

    def change(path: str, value: object, why: str, told: list[str] = notes) -> None:
        if params.get(path) != value:
            told.append(f"{path} = {value!r} instead of {params.get(path)!r}: {why}")
            params.set_path(path, value)

    if params.step.precision == "bfloat16_weights":
        change("step.precision", "float32", "weights are rounded at random", not_verified)
    change("step.precision", "float32", "narrow types round at the borders of shards")
    for own in ("fp8", "nvfp4"):
        for name, _ in (settings := params.step.get(own)).items():
            change(f"step.{own}.{name}", settings.default(name), "float32 does not read it")
    if "moment_dtype" in params.step.optimizer:
        change("step.optimizer.moment_dtype", "float32", "narrow moments are rounded")
    for path, node in params.nodes():
        if "exchange" in node and "precision" in node.exchange:
            why = "one device exchanges nothing"
            change(f"{path}.exchange.precision", "", why, not_verified)
        is_dropless = "dispatch" in node and "Dropless" in node.dispatch.cls.__name__
        if is_dropless and "dropout_rate" in node.experts:
            why = "dropless experts draw the mask on each device"
            change(f"{path}.experts.dropout_rate", 0.0, why, not_verified)
    return params, notes, not_verified


def _smaller_sizes(
    params: Params,
    before: Partitioning,
    after: Partitioning,
    workers: int,
    limits: Mapping[str, _Limit],
) -> Iterator[Mapping[str, int]]:
    """Yields changes of the sizes of letters, path -> size, each for all paths of one size.

    Different sizes of a letter stay different: the second smallest becomes twice what is wanted of
    the letter, the third one three times.
    """
    # A model's size is divided by its heads, and rows by micro-batches.
    multiple = _multiples(params, workers)
    for letter, paths_of_size in sorted(_large_sizes(params, limits).items()):
        parts = [(_parts(letter, t, before), _parts(letter, t, after)) for t in _TABLES]
        for rank, value in enumerate(sorted(paths_of_size), start=1):
            wanted = limits[letter].wanted * rank
            size = _small_size(value, wanted, parts, math.gcd(value, multiple.get(letter, 1)))
            if size < value:
                yield dict.fromkeys(paths_of_size[value], size)


def _large_sizes(params: Params, limits: Mapping[str, _Limit]) -> dict[str, dict[int, list[str]]]:
    """Returns letter -> size -> paths of the Params, for the sizes above the letter's limit."""
    found: dict[str, dict[int, list[str]]] = {}
    for path, value in params.leaves():
        letter = _LETTERS.get(path.rpartition(".")[2])
        if letter == "V" and "vocabulary" not in path:
            continue
        if letter and type(value) is int and value > limits[letter].most:
            found.setdefault(letter, {}).setdefault(value, []).append(path)
    return found


def _multiples(params: Params, workers: int) -> dict[str, int]:
    """Returns numbers that sizes of letters are kept multiples of, if they are multiples."""
    values = {"M": 1, "B": 1}
    for path, value in params.leaves():
        name = path.rpartition(".")[2]
        if name == "num_heads" and value:
            # Twice: rotary position embeddings need an even size of each head.
            values["M"] = math.lcm(values["M"], 2 * value)
        if name == "micro_batches" and value:
            values["B"] = math.lcm(values["B"], value * workers)
    return values


def _parts(letter: str, table: str, partitioning: Partitioning) -> int:
    """Returns the number of parts that a strategy splits a letter into, without overrides."""
    return partitioning.parts(partitioning.split(letter, table)[0])


def _small_size(value: int, about: int, parts: list[tuple[int, int]], multiple: int) -> int:
    """Returns a small size that is divisible wherever `value` is.

    Args:
      about: the size that is wanted.
      parts: (parts before, parts after). The result is divisible by the parts after if `value` is
        divisible by the parts before, and else not.
      multiple: a number that divides the result.
    """
    even = [after for before, after in parts if value % before == 0]
    odd = [after for before, after in parts if value % before]
    unit = math.lcm(multiple, *even)
    # Each device gets two elements if it had two. A bug that uses only the first element of a
    # device would not show with one element.
    about = max(about, *(after * min(2, value // before) for before, after in parts))
    size = math.ceil(about / unit) * unit
    while size < value and any(size % n == 0 for n in odd if n > 1):
        size += unit
    return min(size, value)


def _fewer_layers(params: Params) -> Iterator[Mapping[str, int]]:
    """Yields changes to the depths of stacks, path -> number of layers, the smallest first."""
    paths = [p for p, value in params.leaves() if p.endswith(_LAYERS) and type(value) is int]
    for path in paths:
        depth, parent = params.get(path), params.get(path.rpartition(".")[0])
        period = max(parent.moe_every, 1) if "moe_every" in parent else 1
        for layers in range(math.lcm(period, 2), depth, period):
            if layers < _MOST_LAYERS or layers % period != depth % period:
                continue
            if _builds(_with(params, {path: layers})):
                yield {path: layers}
                break


def _changed(params: Params, changes: Mapping[str, int]) -> tuple[Params, list[str]]:
    """Returns Params with changes and notes on them, or the same Params if they do not build."""
    changed = _with(params, changes)
    if not _builds(changed):
        return params, []
    return changed, [f"{p} = {value} instead of {params.get(p)}" for p, value in changes.items()]


def _with(params: Params, changes: Mapping[str, int]) -> Params:
    params = params.copy()
    for path, value in changes.items():
        params.set_path(path, value)
    return params


def _builds(params: Params) -> bool:
    """Returns whether a model and its batches can be made from Params."""
    try:
        experiments.make_trainer(params)
        experiments.batch_specs(params)
    except ValueError:
        return False
    return True
