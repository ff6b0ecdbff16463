"""Draws how one weight is cut over a mesh of two axes, from the real partitioning."""

from __future__ import annotations

import numpy as np

import lingvo_gshard
from docs.pictures.svg import MARGIN, Picture
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.sharding.sharding_tables import WeightRow, weight_rows
from lingvo_gshard.training import experiments

EXPERIMENT = "translation.quickstart"
WEIGHT = "encoder.layers[1].feed_forward.experts.w_in"
MESH = "data=4,model=2"
STRATEGY = "expert_tensor"

_WIDTH, _HEIGHT = 880, 476
_TOP = 148
# The weight: a floor for each expert. H runs to the right and M to the back.
_LEFT, _FLOOR = 112, 34
_LONG, _BACK, _RISE = 190, 54, 22
# The devices: a row for each index of `data` and a column for each of `model`.
_CARDS, _CARD, _BETWEEN = 500, 166, 16
_SHADES = (1.0, 0.55)


def draw() -> str:
    """Returns the picture as SVG."""
    params = lingvo_gshard.experiment(EXPERIMENT)
    specs = experiments.make_trainer(params).theta_specs.flatten()
    (spec,) = [spec for spec in specs if spec.path == WEIGHT]
    partitioning = Partitioning.make(MESH, STRATEGY)
    (row,) = weight_rows([spec], partitioning)
    split = partitioning.spec_storage_split(spec)
    mesh = partitioning.mesh
    blocks = {
        device: block(row.shape, split, mesh, device) for device in range(partitioning.mesh.size)
    }
    picture = Picture(
        _WIDTH,
        _HEIGHT,
        "One weight, cut over eight devices",
        f"The weight {row.path} of layout {row.layout} and shape {row.shape}. {row.split}. Each "
        f"device of the mesh {mesh} holds {_size(row.bytes_per_device)} of {_size(row.bytes)}.",
    )
    picture.text(MARGIN, 66, row.path, "code muted")
    _draw_weight(picture, row, blocks)
    _draw_devices(picture, row, blocks, mesh)
    picture.text(
        MARGIN,
        _HEIGHT - 24,
        f"--mesh={mesh} --strategy={STRATEGY}: {row.split}. Each device holds "
        f"{_size(row.bytes_per_device)} of {_size(row.bytes)}.",
        "muted",
    )
    return picture.to_text()


def block(shape: tuple[int, ...], split: tuple, mesh: Mesh, device: int) -> list[range]:
    """Returns the indices that a device holds, for each dimension."""
    position = dict(zip(mesh.names, map(int, np.unravel_index(device, mesh.shape)), strict=True))
    block = []
    for size, axes in zip(shape, split, strict=True):
        index = 0
        for axis in axes:
            index = index * mesh.axis_size(axis) + position[axis]
        length = size // mesh.parts(axes)
        block.append(range(index * length, (index + 1) * length))
    return block


def _polygon(picture: Picture, corners: list[tuple[float, float]], device: int) -> None:
    """Draws a part of the weight in its device's color."""
    row, column = divmod(device, len(_SHADES))
    picture.polygon(corners, f"c{row}", fill_opacity=f"{_SHADES[column]:g}")


def _floor(x: float, y: float, start: float, end: float) -> list[tuple[float, float]]:
    """Returns the corners of the part of a floor between two shares of its length."""
    left, right = x + start * _LONG, x + end * _LONG
    return [(left, y), (right, y), (right + _BACK, y - _RISE), (left + _BACK, y - _RISE)]


def _draw_weight(picture: Picture, row: WeightRow, blocks: dict[int, list[range]]) -> None:
    experts, depth, length = row.shape
    picture.text(_LEFT, 106, f"{row.layout}, {' × '.join(map(str, row.shape))}", "head")
    # Later experts are lower; of two floors the upper one is in front.
    for expert in reversed(range(experts)):
        y = _TOP + 10 + expert * _FLOOR
        for device, (held, _, columns) in blocks.items():
            if expert in held:
                shares = columns.start / length, columns.stop / length
                _polygon(picture, _floor(_LEFT, y, *shares), device)
        picture.text(_LEFT - 4, y - 6, f"E {expert}", "small muted end")
    bottom = _TOP + 10 + (experts - 1) * _FLOOR
    cuts = sorted({columns for _, _, columns in blocks.values()}, key=lambda part: part.start)
    for part in cuts:
        middle = _LEFT + (part.start + part.stop) / 2 / length * _LONG
        text = f"H {part.start} to {part.stop - 1}"
        picture.text(middle, bottom + 20, text, "small muted middle")
    side = _LEFT + _LONG + _BACK / 2 + 18
    picture.text(side, bottom - 2, f"M 0 to {depth - 1}", "small muted")


def _draw_devices(
    picture: Picture, row: WeightRow, blocks: dict[int, list[range]], mesh: Mesh
) -> None:
    (rows_name, rows), (columns_name, columns) = mesh.axes
    height = 2 * _FLOOR - 8
    for column in range(columns):
        x = _CARDS + column * (_CARD + _BETWEEN) + _CARD / 2
        picture.text(x, 106, f"{columns_name} {column}", "head middle")
    for index in range(rows):
        y = _TOP - 22 + index * (height + 14)
        picture.text(_CARDS - 14, y + height / 2 + 5, f"{rows_name} {index}", "head end")
        for column in range(columns):
            device = index * columns + column
            x = _CARDS + column * (_CARD + _BETWEEN)
            _draw_card(picture, x, y, height, device, blocks[device], row)


def _draw_card(
    picture: Picture,
    x: float,
    y: float,
    height: float,
    device: int,
    block: list[range],
    row: WeightRow,
) -> None:
    picture.rect(x, y, _CARD, height, "card", 6)
    held, _, columns = block
    share = len(columns) / row.shape[2] * 0.42
    for place in reversed(range(len(held))):
        floor_y = y + height / 2 + 2 + place * 20
        points = _floor(x + 10, floor_y, 0, share)
        corners = [points[0], points[1]]
        corners += [(points[1][0] + 17, floor_y - 8), (points[0][0] + 17, floor_y - 8)]
        _polygon(picture, corners, device)
    picture.text(x + 76, y + 18, f"device {device}", "small")
    picture.text(x + 76, y + 34, f"E {held.start} to {held.stop - 1}", "small muted")
    picture.text(x + 76, y + 50, f"H {columns.start} to {columns.stop - 1}", "small muted")


def _size(size: int) -> str:
    return f"{size / 2**20:g} MiB" if size >= 2**20 else f"{size / 2**10:g} KiB"
