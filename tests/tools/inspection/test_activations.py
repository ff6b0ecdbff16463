"""How gshard-inspect prints activations and the causes of collectives."""

import io

import pytest

from lingvo_gshard.tools.console import Console
from lingvo_gshard.tools.inspection import activations
from lingvo_gshard.wings.propagation.activations import Activation
from lingvo_gshard.wings.propagation.propagated import Resharding


def activation(layer, asked, chosen, size, source="mine.py:3", **more):
    fields = {"operations": ("MatMul", "Relu"), "layout": "BLH" if asked else "", "parts": 8}
    parts = 1 if chosen == "whole" else 8
    fields |= {"dtype": "float32", "shape": (8, 4, size // 128), "parts": parts}
    return Activation(
        layer=layer,
        asked=asked,
        chosen=chosen,
        bytes=size,
        bytes_per_device=size // parts,
        source=source,
        **(fields | more),
    )


def printed(function, *arguments, **options):
    console = Console(file=io.StringIO(), width=200)
    function(console, *arguments, **options)
    return console.file.getvalue()


def test_large_whole_activations_are_a_warning_with_layer_and_line():
    rows = [
        activation("decoder.layers[0]", "B over data", "B over data", 2**20),
        activation("decoder.layers[0]", "", "whole", 2**20, "mine.py:7"),
        activation("decoder.layers[1]", "whole", "whole", 2**21, "mine.py:9"),
        activation("decoder.layers[1]", "", "whole", 2**10, "mine.py:11"),
    ]
    out = printed(activations.print_activations, rows)
    lines = [line.split() for line in out.lstrip("\n").splitlines()]
    assert ["decoder.layers[0]", "MatMul,", "Relu", "BLH"] == lines[2][:4]
    assert lines[2][-3:] == ["128", "KiB", "mine.py:3"]
    assert lines[2][-6:-3] == ["over", "data", "annotation"]
    assert lines[3][-5:-3] == ["whole", "XLA"]
    # The last one is small, and every device may well have it.
    assert "4 activations of the forward pass: 2 are annotated, XLA chose the sharding of 2" in out
    assert "1 have less than 1% of the bytes of the largest" in out and "mine.py:11" not in out
    assert [line for line in out.splitlines() if line.startswith("Warning")] == [
        "Warning: decoder.layers[1]: float32[8,4,16384], 2 MiB, is whole on every device: its "
        "annotation BLH splits no dimension, at mine.py:9 (MatMul, Relu)",
        "Warning: decoder.layers[0]: float32[8,4,8192], 1 MiB, is whole on every device: no "
        "annotation says how to split it, at mine.py:7 (MatMul, Relu)",
    ]


def test_a_pattern_selects_layers_and_all_that_is_in_them():
    rows = [activation(layer, "", "whole", 128) for layer in ("", "a.b[0]", "a.b[0].c", "a.b[1]")]
    assert [row.layer for row in activations.select(rows, "a.b[0]")] == ["a.b[0]", "a.b[0].c"]
    assert activations.select(rows, "a.b") == rows[1:]
    assert activations.select(rows, "*") == activations.select(rows, "task") == rows
    with pytest.raises(ValueError, match="does not say how it splits"):
        activations.select(None, "*")


def test_the_annotation_behind_a_collective_is_named():
    rows = [
        Resharding(
            "all-gather",
            ("model",),
            "decoder.layers[0]",
            "forward",
            1,
            2**20,
            "Relu",
            "mine.py:3",
            before="B over data, H over model",
            after="B over data",
            layout="BL_",
            annotated_at="mine.py:4",
        ),
        Resharding("all-to-all", (), "", "backward", 2, 2**10, "", ""),
    ]
    lines = printed(activations.print_reshardings, rows).lstrip("\n").splitlines()
    assert "all-gather over model" in lines[2]
    assert lines[2].rstrip().endswith("1 MiB  annotation BL_ at mine.py:4 of Relu at mine.py:3")
    assert "  decoder.layers[0], forward" in lines[3]
    assert lines[3].rstrip().endswith("  from B over data, H over model to B over data")
    assert lines[4].rstrip().endswith("1 KiB  an operation at an unknown line")
    assert printed(activations.print_reshardings, []) == ""
