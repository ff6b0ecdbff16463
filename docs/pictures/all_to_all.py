"""Draws the change of layout that is the all-to-all, from a real routing and a compiled program."""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf

import lingvo_gshard
from docs.pictures.svg import MARGIN, Picture
from lingvo_gshard.layers.moe.exchange import Exchange
from lingvo_gshard.layers.moe.routers.top_k import SwitchRouter
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.sharding.sharding_tables import split_in_words
from lingvo_gshard.wings.hlo import CollectiveCall

DEVICES = 4
MESH = f"data={DEVICES}"
STRATEGY = "expert"
# A group of tokens and an expert for each device.
GROUPS = EXPERTS = DEVICES
TOKENS = 8
MODEL_DIM = 128
SEED = 11

_WIDTH, _HEIGHT = 880, 470
_FIRST_ROW, _ROW = 158, 62
# Squares lie this much above the middle of a row, labels below it.
_RAISED, _LABEL = 9, 14
_HEIGHT_OF_CARD = 44
_CELL, _STEP = 12, 15
_TOKENS_AT, _BUFFERS_AT, _EXPERTS_AT = 112, 266, 640
_BOX_PADDING, _BETWEEN_BOXES = 4, 4


@dataclasses.dataclass(frozen=True)
class Routed:
    """The routing of a few tokens.

    Attributes:
      expert_GS: the expert that each token chose.
      kept_GS: whether the token got a capacity slot.
      filled_GEC: whether a capacity slot holds a token.
    """

    expert_GS: np.ndarray
    kept_GS: np.ndarray
    filled_GEC: np.ndarray


def route() -> Routed:
    """Returns the choices that a new SwitchRouter makes for random tokens."""
    router = SwitchRouter.params().set(model_dim=MODEL_DIM, num_experts=EXPERTS)
    layer = router.set(capacity_factor=1.5).instantiate(path="router")
    shape = (GROUPS, TOKENS, MODEL_DIM)
    x_GSM = np.random.default_rng(SEED).normal(size=shape).astype(np.float32)
    theta = layer.init(seed=SEED)
    routing = layer.fprop(theta, tf.constant(x_GSM), tf.ones((GROUPS, TOKENS)))
    (assignment,) = routing.assignments
    expert_GS, position_GS, kept_GS = (
        np.asarray(tensor)
        for tensor in (assignment.expert_GS, assignment.position_GS, assignment.kept_GS)
    )
    filled_GEC = np.zeros((GROUPS, EXPERTS, routing.capacity), bool)
    for group, token in np.argwhere(kept_GS):
        filled_GEC[group, expert_GS[group, token], position_GS[group, token]] = True
    return Routed(expert_GS, kept_GS, filled_GEC)


def compiled_collectives(capacity: int) -> list[CollectiveCall]:
    """Returns the collectives of the compiled program that exchanges these buffers."""
    exchange = Exchange.params().instantiate()
    function = lingvo_gshard.partition(
        lambda x_GECM: exchange.run(x_GECM, lambda x_EGCM: 2.0 * x_EGCM),
        MESH,
        STRATEGY,
        layouts=["GECM"],
    )
    buffers = tf.TensorSpec((GROUPS, EXPERTS, capacity, MODEL_DIM))
    return function.compile(buffers).collectives()


def draw() -> str:
    """Returns the picture as SVG."""
    routed = route()
    partitioning = Partitioning.make(MESH, STRATEGY)
    words = {
        layout: split_in_words(layout, partitioning.split(layout), partitioning)
        for layout in ("GSM", "GECM", "EGCM")
    }
    calls = compiled_collectives(routed.filled_GEC.shape[2])
    kinds = {call.kind for call in calls}
    assert len(kinds) == 1 and len(calls) == 2, calls
    size = calls[0].bytes
    picture = Picture(
        _WIDTH,
        _HEIGHT,
        "A change of layout is an all-to-all",
        f"Tokens GSM are split by groups over {DEVICES} devices. A router fills a buffer for each "
        "expert, GECM, on the device of the group. The layout EGCM is split by experts: each "
        "device receives the buffers of its expert from all groups.",
    )
    dropped = int((~routed.kept_GS).sum())
    picture.text(
        MARGIN,
        66,
        f"{GROUPS} groups of {TOKENS} tokens, {EXPERTS} experts, {DEVICES} devices. The color is "
        f"the group of a token, the number its expert.",
        "muted",
    )
    _draw_headings(picture, words)
    for device in range(DEVICES):
        _draw_device(picture, routed, device)
    _draw_exchange(picture, routed)
    bottom = _FIRST_ROW + DEVICES * _ROW + 22
    picture.text(
        MARGIN,
        bottom,
        f"XLA compiles the step from GECM to EGCM into one {calls[0].kind} of "
        f"{size / 1024:g} KiB on each device, and the way back into another.",
        "muted",
    )
    note = f"{dropped} tokens were dropped" if dropped != 1 else "1 token was dropped"
    picture.text(
        MARGIN,
        bottom + 20,
        f"Dashed: empty capacity slots, and tokens whose expert had none left ({note}).",
        "muted",
    )
    return picture.to_text()


def _draw_headings(picture: Picture, words: dict[str, str]) -> None:
    columns = (
        (_TOKENS_AT, "GSM", "tokens"),
        (_BUFFERS_AT, "GECM", "a buffer for each expert"),
        (_EXPERTS_AT, "EGCM", "input of each expert"),
    )
    for x, layout, meaning in columns:
        picture.text(x, 106, layout, "head")
        picture.text(x + 10 * len(layout) + 12, 106, meaning, "small")
        picture.text(x, 126, words[layout], "small muted")


def _top(device: int) -> float:
    return _FIRST_ROW + device * _ROW - _HEIGHT_OF_CARD / 2 + 6


def _box_size(capacity: int) -> float:
    return capacity * _STEP - (_STEP - _CELL) + 2 * _BOX_PADDING


def _box_left(start: float, index: int, capacity: int) -> float:
    return start + index * (_box_size(capacity) + _BETWEEN_BOXES)


def _draw_device(picture: Picture, routed: Routed, device: int) -> None:
    top = _top(device)
    middle = top + _HEIGHT_OF_CARD / 2
    picture.text(MARGIN, middle - _RAISED + 5, f"device {device}", "head")
    picture.rect(_TOKENS_AT - 8, top, TOKENS * _STEP + 13, _HEIGHT_OF_CARD, "card", 6)
    for token in range(TOKENS):
        x = _TOKENS_AT + token * _STEP
        style = f"c{device}" if routed.kept_GS[device, token] else "empty"
        picture.rect(x, middle - _RAISED - _CELL / 2, _CELL, _CELL, style)
        expert = routed.expert_GS[device, token]
        picture.text(x + _CELL / 2, middle + _LABEL, str(expert), "small muted middle")
    buffers = routed.filled_GEC[device]
    received = routed.filled_GEC[:, device]
    _draw_boxes(picture, _BUFFERS_AT, middle, buffers, [device] * EXPERTS)
    _draw_boxes(picture, _EXPERTS_AT, middle, received, list(range(GROUPS)))
    for expert in range(EXPERTS):
        left = _box_left(_BUFFERS_AT, expert, buffers.shape[1])
        x = left + _box_size(buffers.shape[1]) / 2
        picture.text(x, middle + _LABEL, f"E {expert}", "small muted middle")
    picture.text(_EXPERTS_AT - 12, middle - _RAISED + 4, f"E {device}", "small muted end")


def _draw_boxes(
    picture: Picture, start: float, middle: float, filled: np.ndarray, colors: list[int]
) -> None:
    capacity = filled.shape[1]
    for index, row in enumerate(filled):
        left = _box_left(start, index, capacity)
        height = _CELL + 2 * _BOX_PADDING
        picture.rect(left, middle - height / 2 - _RAISED, _box_size(capacity), height, "card", 5)
        for slot, is_filled in enumerate(row):
            x = left + _BOX_PADDING + slot * _STEP
            style = f"c{colors[index]}" if is_filled else "empty"
            picture.rect(x, middle - _CELL / 2 - _RAISED, _CELL, _CELL, style)


def _draw_exchange(picture: Picture, routed: Routed) -> None:
    """Draws a line from each device to each expert, in the color of the sending group."""
    capacity = routed.filled_GEC.shape[2]
    start = _box_left(_BUFFERS_AT, EXPERTS - 1, capacity) + _box_size(capacity) + 10
    end = _EXPERTS_AT - 38
    for group in range(GROUPS):
        for expert in range(EXPERTS):
            y = _top(group) + _HEIGHT_OF_CARD / 2 - _RAISED
            to = _top(expert) + _HEIGHT_OF_CARD / 2 - _RAISED
            bend = (end - start) * 0.5
            picture.path(
                f"M{start:g},{y:g} C{start + bend:g},{y:g} {end - bend:g},{to:g} {end:g},{to:g}",
                f"s{group}",
                stroke_width="1.75",
                stroke_opacity="0.8",
            )
