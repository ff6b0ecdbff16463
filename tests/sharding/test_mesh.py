"""Tests Mesh: its text form, the order of devices, and error messages."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from lingvo_gshard.sharding.mesh import Mesh

names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: name != "none")
axes = st.lists(
    st.tuples(names, st.integers(1, 6)), min_size=1, max_size=4, unique_by=lambda a: a[0]
)


@hypothesis.given(axes)
def test_meshes_round_trip_through_text(some):
    mesh = Mesh(tuple(some))
    assert Mesh.parse(str(mesh)) == mesh
    assert Mesh.parse(" , ".join(f"{name} = {size}" for name, size in some)) == mesh
    assert mesh.names == tuple(name for name, _ in some)
    assert mesh.shape == tuple(size for _, size in some)
    assert all(mesh.axis_size(name) == size for name, size in some)


@hypothesis.given(axes)
def test_the_last_axis_varies_fastest(some):
    mesh = Mesh(tuple(some))
    ids = mesh.ids
    assert ids.shape == mesh.shape and ids.size == mesh.size
    for place in np.ndindex(*mesh.shape):
        expected = 0
        for index, size in zip(place, mesh.shape, strict=True):
            expected = expected * size + index
        assert ids[place] == expected


@pytest.mark.parametrize(
    ("text", "slices", "parts"),
    [
        ("data=16,model=4", 4, (4, 1)),
        ("data=2,model=8", 4, (2, 2)),
        ("a=2,b=3,c=5", 6, (2, 3, 1)),
        ("data=1,model=8", 8, (1, 8)),
        ("data=6,model=4", 1, (1, 1)),
    ],
)
def test_leading_axes_cross_slices(text, slices, parts):
    mesh = Mesh.parse(text)
    assert mesh.across_slices(slices) == parts
    # Devices that differ within slices only are in the same slice.
    slice_of = mesh.ids // (mesh.size // slices)
    for axis, (part, size) in enumerate(zip(parts, mesh.shape, strict=True)):
        groups = np.moveaxis(slice_of, axis, -1).reshape(-1, part, size // part)
        assert (groups == groups[..., :1]).all()
        assert all(len(set(each[:, 0])) == part for each in groups)


@pytest.mark.parametrize(("text", "slices"), [("data=3,model=4", 2), ("data=6,model=4", 4)])
def test_slices_that_do_not_divide_the_leading_axes_are_refused(text, slices):
    with pytest.raises(ValueError, match=f"`mesh={text}`: .* over {slices} slices; expected"):
        Mesh.parse(text).across_slices(slices)


def test_devices_keep_the_listed_order():
    mesh = Mesh.parse("data=2,model=3")
    devices = [f"device {i}" for i in range(6)]
    arranged = mesh.arrange(devices)
    assert arranged.tolist() == [devices[:3], devices[3:]]
    mesh.check_devices(6)


def test_topology_order_is_a_permutation_of_the_devices():
    jax = pytest.importorskip("jax")
    mesh = Mesh.parse("data=1,model=1", device_order="topology")
    assert mesh.arrange(jax.devices()[:1]).tolist() == [[jax.devices()[0]]]


def test_topology_order_places_axis_neighbors_next_to_each_other():
    """On a 4x4 torus of TPU v2, neighbors in a ring are one hop apart."""
    topologies = pytest.importorskip("jax.experimental.topologies")
    pytest.importorskip("libtpu")
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices
    except Exception as error:
        pytest.skip(f"no TPU topologies here: {error}")
    ring = Mesh.parse("data=16", device_order="topology").arrange(devices)
    steps = [
        sum(abs(a - b) for a, b in zip(one.coords, other.coords, strict=True))
        for one, other in zip(ring, np.roll(ring, -1), strict=True)
    ]
    assert sorted(d.id for d in ring) == sorted(d.id for d in devices)
    assert max(steps) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "`mesh` is empty; expected axes with their sizes, such as data=4,model=2"),
        ("data", "`mesh=data`: 'data'; expected axes"),
        ("data=4,", "`mesh=data=4,`: ''; expected axes"),
        ("data=4,model", "'model'; expected axes"),
        ("data=four", "'data=four'; expected axes"),
        ("data=4=2", "'data=4=2'; expected axes"),
        ("data=-1", "'data=-1'; expected axes"),
        ("data=²", "expected axes"),
        ("data=0", "axis 'data' has size 0"),
        ("4=data", "'4=data'"),
        ("da ta=2", "'da ta' cannot name an axis"),
        ("none=2", "'none' cannot name an axis"),
        ("data=2,model=2,data=2", "axis 'data' is repeated"),
    ],
)
def test_rejects_invalid_meshes(text, message):
    with pytest.raises(ValueError, match=message):
        Mesh.parse(text)


def test_an_unknown_axis_or_order_suggests_the_nearest():
    mesh = Mesh.parse("data=4,model=2")
    with pytest.raises(ValueError, match="no axis 'modle'. Did you mean 'model'"):
        mesh.axis_size("modle")
    with pytest.raises(ValueError, match="order 'topologic'. Did you mean 'topology'"):
        Mesh.parse("data=4", device_order="topologic")


def test_rejects_the_wrong_number_of_devices():
    mesh = Mesh.parse("data=4,model=2")
    message = r"`mesh=data=4,model=2` needs 8 devices \(4 x 2\), but there are 6"
    for check in (lambda: mesh.check_devices(6), lambda: mesh.arrange(range(6))):
        with pytest.raises(ValueError, match=message):
            check()
