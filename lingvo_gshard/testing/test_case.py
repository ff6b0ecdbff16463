"""TestCase: tf.test.TestCase with a mesh of virtual devices, trees, and collectives by kind."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from lingvo_gshard.core.lazy import Device
from lingvo_gshard.runtime import Executable, devices_for
from lingvo_gshard.wings import hlo
from lingvo_gshard.wings.functions.partition import Partitioned


class TestCase(tf.test.TestCase):
    """A tf.test.TestCase for code that runs on many devices.

    Class attributes:
      DEVICES: number of devices that a mesh may have. Missing ones are virtual CPU devices, which
        jax creates before it is first used.
    """

    DEVICES = 8

    @classmethod
    def setUpClass(cls) -> None:
        """Creates the devices."""
        super().setUpClass()
        devices_for(cls.DEVICES)

    def devices(self, count: int) -> list[Device]:
        """Returns the first `count` devices."""
        return devices_for(count)

    def assertAllClose(
        self, a: Any, b: Any, rtol: float = 1e-6, atol: float = 1e-6, msg: str | None = None
    ) -> None:
        """Asserts that two trees have the same structure, shapes and nearly the same values.

        Args:
          a: what was computed: a tensor, a NumPy array or a jax.Array, which may be sharded; or
            mappings (`NestedMap` among them), lists and tuples of them.
          b: what is expected.
          rtol: allowed difference as a share of the expected value.
          atol: allowed difference besides.
          msg: what the message of a failure begins with.
        """
        found, expected = dict(_leaves(a)), dict(_leaves(b))
        if found.keys() != expected.keys():
            missing = sorted(expected.keys() - found.keys())
            extra = sorted(found.keys() - expected.keys())
            self.fail(
                f"{msg or 'The structures differ'}: {', '.join(missing) or 'nothing'} is missing, "
                f"{', '.join(extra) or 'nothing'} was not expected"
            )
        for path, value in expected.items():
            where = ": ".join(part for part in (msg, path) if part)
            super().assertAllClose(found[path], value, rtol, atol, where)

    def assertCollectives(
        self,
        compiled: Partitioned | Executable,
        *arguments: Any,
        expected: Mapping[str, int],
        per_step: bool = False,
    ) -> None:
        """Asserts which collectives a compiled function has, by kind and count.

        The message of a failure lists each collective: kind, executions, bytes, and the name of the
        operation, which contains the layer.

        Args:
          compiled: what `lingvo_gshard.partition` returns, or an executable.
          *arguments: arguments of the shapes to compile for; none for an executable.
          expected: kind, such as "all-reduce", -> count.
          per_step: counts a collective in a loop as often as the loop executes it; else once.
        """
        executable = compiled if isinstance(compiled, Executable) else compiled.compile(*arguments)
        calls = executable.collectives()
        count = hlo.count_per_step if per_step else hlo.count_by_kind
        found = collections.Counter(count(calls))
        if found == collections.Counter(expected):
            return
        lines = [f"  {c.kind}, {c.times} x {c.bytes:,} bytes: {c.op_name}" for c in calls]
        self.fail(
            "\n".join([f"{dict(found)} in place of {dict(expected)}", *(lines or ["  none"])])
        )

    def assertDistributed(self, array: Any, axes: str | tuple[str, ...], dimension: int) -> None:
        """Asserts that mesh axes split one dimension of a jax.Array.

        Args:
          array: the array.
          axes: an axis, several axes, or "" for a dimension that no axis splits.
          dimension: the dimension.
        """
        spec = tuple(array.sharding.spec) + (None,) * array.ndim
        found = spec[dimension] or ()
        found = (found,) if isinstance(found, str) else tuple(found)
        wanted = ((axes,) if axes else ()) if isinstance(axes, str) else tuple(axes)
        self.assertEqual(found, wanted, f"dimension {dimension} of an array split as {spec}")


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yields (path, array) of a tree's leaves."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _leaves(value, f"{path}.{name}" if path else str(name))
    elif isinstance(tree, (list, tuple)) and not all(np.isscalar(value) for value in tree):
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        yield path, _as_array(tree)


def _as_array(value: Any) -> np.ndarray:
    """Returns a value as an array that NumPy compares; bfloat16 as float32."""
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
