"""Tests Mesh: its text form, the order of devices, and error messages."""

import importlib.util

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
from absl.testing import parameterized
from jax.experimental import topologies

from lingvo_gshard import testing
from lingvo_gshard.sharding.mesh import Mesh

names = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: name != "none")
axes = st.lists(
    st.tuples(names, st.integers(1, 6)), min_size=1, max_size=4, unique_by=lambda a: a[0]
)


class MeshTest(testing.TestCase, parameterized.TestCase):
    @hypothesis.settings(deadline=None)
    @hypothesis.given(axes)
    def test_meshes_round_trip_through_text(self, some):
        mesh = Mesh(tuple(some))
        self.assertEqual(Mesh.parse(str(mesh)), mesh)
        self.assertEqual(Mesh.parse(" , ".join(f"{name} = {size}" for name, size in some)), mesh)
        self.assertEqual(mesh.names, tuple(name for name, _ in some))
        self.assertEqual(mesh.shape, tuple(size for _, size in some))
        self.assertTrue(all(mesh.axis_size(name) == size for name, size in some))

    @hypothesis.settings(deadline=None)
    @hypothesis.given(axes)
    def test_the_last_axis_varies_fastest(self, some):
        mesh = Mesh(tuple(some))
        ids = mesh.ids
        self.assertEqual(ids.shape, mesh.shape)
        self.assertEqual(ids.size, mesh.size)
        for place in np.ndindex(*mesh.shape):
            expected = 0
            for index, size in zip(place, mesh.shape, strict=True):
                expected = expected * size + index
            self.assertEqual(ids[place], expected)

    @parameterized.parameters(
        ("data=16,model=4", 4, (4, 1)),
        ("data=2,model=8", 4, (2, 2)),
        ("a=2,b=3,c=5", 6, (2, 3, 1)),
        ("data=1,model=8", 8, (1, 8)),
        ("data=6,model=4", 1, (1, 1)),
    )
    def test_leading_axes_cross_slices(self, text, slices, parts):
        mesh = Mesh.parse(text)
        self.assertEqual(mesh.across_slices(slices), parts)
        # Devices that differ within slices only are in the same slice.
        slice_of = mesh.ids // (mesh.size // slices)
        for axis, (part, size) in enumerate(zip(parts, mesh.shape, strict=True)):
            groups = np.moveaxis(slice_of, axis, -1).reshape(-1, part, size // part)
            self.assertTrue((groups == groups[..., :1]).all())
            self.assertTrue(all(len(set(each[:, 0])) == part for each in groups))

    @parameterized.parameters(("data=3,model=4", 2), ("data=6,model=4", 4))
    def test_slices_that_do_not_divide_the_leading_axes_are_refused(self, text, slices):
        with self.assertRaisesRegex(
            ValueError, f"`mesh={text}`: .* over {slices} slices; expected"
        ):
            Mesh.parse(text).across_slices(slices)

    def test_devices_keep_the_listed_order(self):
        mesh = Mesh.parse("data=2,model=3")
        devices = [f"device {i}" for i in range(6)]
        arranged = mesh.arrange(devices)
        self.assertEqual(arranged.tolist(), [devices[:3], devices[3:]])
        mesh.check_devices(6)

    def test_topology_order_is_a_permutation_of_the_devices(self):
        mesh = Mesh.parse("data=1,model=1", device_order="topology")
        self.assertEqual(mesh.arrange(jax.devices()[:1]).tolist(), [[jax.devices()[0]]])

    def test_topology_order_places_axis_neighbors_next_to_each_other(self):
        """Checks that neighbors in a ring are one hop apart on 4x4 chips of TPU v5e."""
        if not importlib.util.find_spec("libtpu"):
            self.skipTest("libtpu is not installed")
        try:
            devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices
        except Exception as error:
            self.skipTest(f"no TPU topologies here: {error}")
        ring = Mesh.parse("data=16", device_order="topology").arrange(devices)
        steps = [
            sum(abs(a - b) for a, b in zip(one.coords, other.coords, strict=True))
            for one, other in zip(ring, np.roll(ring, -1), strict=True)
        ]
        self.assertEqual(sorted(d.id for d in ring), sorted(d.id for d in devices))
        self.assertEqual(max(steps), 1)


class ErrorsTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(
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
    )
    def test_rejects_invalid_meshes(self, text, message):
        with self.assertRaisesRegex(ValueError, message):
            Mesh.parse(text)

    def test_an_unknown_axis_or_order_suggests_the_nearest(self):
        mesh = Mesh.parse("data=4,model=2")
        with self.assertRaisesRegex(ValueError, "no axis 'modle'. Did you mean 'model'"):
            mesh.axis_size("modle")
        with self.assertRaisesRegex(ValueError, "order 'topologic'. Did you mean 'topology'"):
            Mesh.parse("data=4", device_order="topologic")

    def test_rejects_the_wrong_number_of_devices(self):
        mesh = Mesh.parse("data=4,model=2")
        message = r"`mesh=data=4,model=2` needs 8 devices \(4 x 2\), but there are 6"
        for check in (lambda: mesh.check_devices(6), lambda: mesh.arrange(range(6))):
            with self.assertRaisesRegex(ValueError, message):
                check()


if __name__ == "__main__":
    testing.main()
