"""Checks which meshes fewer hosts have."""

import itertools
import math

import pytest

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.agents.meshes import mesh_choices


def test_data_shrinks_before_fsdp_and_other_axes_stay():
    choices = mesh_choices("fsdp=4,data=2,model=2", 8)
    assert choices == {
        8: "fsdp=4,data=2,model=2",
        4: "fsdp=4,data=1,model=2",
        2: "fsdp=2,data=1,model=2",
        1: "fsdp=1,data=1,model=2",
    }


def test_every_mesh_divides_what_the_full_one_divides():
    for data, fsdp, hosts in itertools.product((1, 2, 6), (1, 4), (1, 2, 3)):
        if data * fsdp % hosts:
            continue
        for count, text in mesh_choices(f"data={data},fsdp={fsdp}", hosts).items():
            assert text is not None
            mesh = Mesh.parse(text)
            assert mesh.size * hosts == data * fsdp * count
            assert data % mesh.axis_size("data") == 0 and fsdp % mesh.axis_size("fsdp") == 0


def test_an_axis_that_stays_limits_the_hosts():
    assert list(mesh_choices("data=2,model=8", 8)) == [8, 4]


def test_other_meshes_are_for_other_numbers_of_hosts():
    choices = mesh_choices("data=8", 4, ["data=6"])
    assert choices == {4: "data=8", 3: "data=6", 2: "data=4", 1: "data=2"}
    assert math.prod(Mesh.parse(choices[3] or "").shape) == 6


def test_without_a_mesh_all_hosts_train_or_none():
    assert mesh_choices(None, 4) == {4: None}


@pytest.mark.parametrize(
    ("mesh", "others", "named"),
    [
        ("data=3", (), "`mesh=data=3` has 3 devices"),
        ("data=8", ("data=5",), "`other_mesh=data=5` has 5 devices"),
        ("data=8", ("data=16",), "`other_mesh=data=16` has 16 devices"),
        (None, ("data=2",), "`other_mesh=data=2` needs a `mesh`"),
    ],
)
def test_wrong_meshes_are_refused_by_name(mesh, others, named):
    with pytest.raises(UserError, match=named):
        mesh_choices(mesh, 4, others)
