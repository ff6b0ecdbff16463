"""Tolerances of the tests, named by the source of the difference."""

from __future__ import annotations

from typing import Any

import numpy as np

# Largest allowed error relative to the largest expected magnitude.
TOLERANCES = {
    # The same float32 operations, in another order or fused.
    "order": 1e-4,
    # float32 against a formula in float64.
    "float32": 1e-5,
    # float32 statistics over a few thousand draws.
    "sampling": 3e-2,
    # bfloat16 activations, of 8 significant bits, against float32. Not all CPUs round alike.
    "bfloat16": 3e-2,
    # A gradient against a central difference of a float32 function.
    "difference": 1e-2,
}


def assert_close(
    actual: Any, expected: Any, separated_by: str, least_scale: float = 1e-3, what: str = ""
) -> None:
    """Asserts that shapes are equal and the largest error is within the named tolerance.

    Args:
      actual: what was computed.
      expected: what it should be.
      separated_by: a key of TOLERANCES.
      least_scale: lower bound of the scale of `expected`, so that zeros can be compared.
      what: what the message of a failure begins with.
    """
    actual = np.asarray(actual, np.float64)
    expected = np.asarray(expected, np.float64)
    begin = f"{what}: " if what else ""
    assert actual.shape == expected.shape, f"{begin}shape {actual.shape}, not {expected.shape}"
    if not expected.size:
        return
    scale = max(float(np.abs(expected).max()), least_scale)
    error = float(np.abs(actual - expected).max()) / scale
    allowed = TOLERANCES[separated_by]
    assert error <= allowed, f"{begin}error {error:.2e} of {scale:.3g}, allowed {allowed:.0e}"
