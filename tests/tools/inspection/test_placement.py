# tests: tools/inspection/inspection.py
"""Which device holds which part of a tensor, compared with jax."""

import jax
import pytest

from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.tools.inspection.inspection import weight_parts

CASES = [
    ("data=8", (8, 4), (("data",), ())),
    ("data=4,model=2", (8, 6), (("data",), ("model",))),
    ("data=4,model=2", (6, 8), ((), ("model",))),
    ("data=2,fsdp=2,model=2", (8, 3, 4), (("data", "model"), (), ("fsdp",))),
    ("data=2,fsdp=2,model=2", (16, 3), (("model", "data", "fsdp"), ())),
    ("data=2,model=4", (5,), ((),)),
    ("data=2,model=4", (), ()),
]


@pytest.mark.parametrize("mesh, shape, split", CASES, ids=str)
def test_parts_are_those_of_jax(mesh, shape, split):
    mesh = Mesh.parse(mesh)
    devices = devices_for(8)
    spec = jax.sharding.PartitionSpec(*(axes or None for axes in split))
    sharding = jax.sharding.NamedSharding(
        jax.sharding.Mesh(mesh.arrange(devices), mesh.names), spec
    )
    place = {device: index for index, device in enumerate(devices)}
    expected = {}
    for device, index in sharding.devices_indices_map(shape).items():
        ranges = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        expected.setdefault(ranges, []).append(place[device])
    found = weight_parts(shape, split, mesh)
    assert {part.ranges: sorted(part.devices) for part in found} == {
        ranges: sorted(held) for ranges, held in expected.items()
    }
    assert [part.ranges for part in found] == sorted(expected)
