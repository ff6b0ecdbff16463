# tests: runtime/lowering/operations.py, wings/spmd_passes/sharding_text.py
"""Compares splits that are read from the text of shardings with numbered devices."""

import pytest

from lingvo_gshard.runtime.lowering.operations import shortened
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.spmd_passes.sharding_text import split_of_text, text_of_split

MESH = Mesh.parse("data=2,model=4")


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("{replicated}", ((), ())),
        ("{devices=[8,1]0,1,2,3,4,5,6,7}", (("data", "model"), ())),
        ("{devices=[8,1]<=[8]}", (("data", "model"), ())),
        ("{devices=[2,4]<=[8]}", (("data",), ("model",))),
        ("{devices=[4,2]<=[2,4]T(1,0)}", (("model",), ("data",))),
        ("{devices=[4,2]0,4,1,5,2,6,3,7}", (("model",), ("data",))),
        ("{devices=[2,1,4]<=[8] last_tile_dim_replicate}", (("data",), ())),
        ("{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}", ((), ("model",))),
        ("{devices=[1,8]0,4,1,5,2,6,3,7}", ((), ("model", "data"))),
    ],
)
def test_sharding_text_is_parsed(text, split):
    assert split_of_text(text, 2, MESH) == split


@pytest.mark.parametrize(
    "text",
    [
        "{devices=[8,1]1,0,2,3,4,5,6,7}",
        "{devices=[2,2]<=[4]}",
        "{devices=[2,2,2]<=[8]}",
        "{maximal device=0}",
        "{manual}",
    ],
)
def test_what_is_no_split_over_the_mesh_is_not_read(text):
    assert split_of_text(text, 2, MESH) is None


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("{devices=[8,1]0,1,2,3,4,5,6,7}", "{devices=[8,1]<=[8]}"),
        ("{devices=[4,2]0,4,1,5,2,6,3,7}", "{devices=[4,2]<=[2,4]T(1,0)}"),
        (
            "{devices=[1,4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}",
            "{devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate}",
        ),
        (
            "{devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dims={manual}}",
            "{devices=[2,1,4]<=[8] last_tile_dims={manual}}",
        ),
        ("{devices=[8,1]1,0,2,3,4,5,6,7}", "{devices=[8,1]1,0,2,3,4,5,6,7}"),
        ("{devices=[2,2]0,1,2,3}", "{devices=[2,2]0,1,2,3}"),
        ("{devices=[2,4]<=[8]}", "{devices=[2,4]<=[8]}"),
        ("{replicated}", "{replicated}"),
        ("{manual}", "{manual}"),
    ],
)
def test_lists_of_devices_become_iotas(text, short):
    assert shortened(text, MESH) == short
    assert split_of_text(short, 2, MESH) == split_of_text(text, 2, MESH)


@pytest.mark.parametrize(
    "split",
    [
        ((), ()),
        (("data",), ()),
        ((), ("model",)),
        (("model",), ("data",)),
        (("data", "model"), ()),
        (("model", "data"), ()),
        (("data",), ("model",)),
    ],
)
@pytest.mark.parametrize("mesh", ["data=2,model=4", "data=1,model=8", "data=512,model=64"])
def test_what_is_written_is_read_and_does_not_grow_with_the_mesh(split, mesh):
    mesh = Mesh.parse(mesh)
    text = text_of_split(split, mesh)
    assert len(text) < 80
    used = {axis for axes in split for axis in axes if mesh.axis_size(axis) > 1}
    kept = tuple(tuple(axis for axis in axes if axis in used) for axes in split)
    assert split_of_text(text, 2, mesh) == kept
