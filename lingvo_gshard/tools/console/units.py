"""Formats numbers with units for the terminal. None and non-numbers become "-"."""

from __future__ import annotations

from typing import Any, TypeGuard

MISSING = "-"
# No machine does anything in less; shorter times are parts of means.
_LEAST_SECONDS = 1e-10
_LARGE = ("", "thousand", "million", "billion", "trillion", "quadrillion")
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FLOPS = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")


def in_bytes(value: float | None) -> str:
    """Returns bytes with a binary unit, such as `12 B` or `3.4 KiB`."""
    return _scaled(value, 1024, _BYTES)


def in_flops(value: float | None) -> str:
    """Returns floating-point operations with a unit, such as `3.4 GFLOP`."""
    return _scaled(value, 1000, _FLOPS)


def in_large(value: float | None) -> str:
    """Returns `1,234`, or `5.6 million` and so on for a million and more."""
    if is_number(value) and abs(value) < 999_500:
        return digits(value) if abs(value) < 100 else f"{value:,.0f}"
    return _scaled(value, 1000, _LARGE)


def in_seconds(value: float | None) -> str:
    """Returns seconds with a unit, such as `12 ns`, `3.4 us`, `5.6 ms` or `7.8 s`."""
    if not is_number(value):
        return MISSING
    if 0 < abs(value) < _LEAST_SECONDS:
        return "under 0.1 ns"
    for limit, unit in ((0.9995e-6, "ns"), (0.9995e-3, "us"), (0.9995, "ms")):
        if abs(value) < limit and value:
            return f"{digits(value * {'ns': 1e9, 'us': 1e6, 'ms': 1e3}[unit])} {unit}"
    return f"{digits(value)} s"


def in_share(value: float | None) -> str:
    """Returns a fraction of one as a percentage, such as `12%` or `3.4%`."""
    if not is_number(value):
        return MISSING
    return f"{value:.0%}" if abs(value) >= 0.0995 else f"{value:.1%}"


def in_fine_share(value: float | None) -> str:
    """Returns a fraction of one as a percentage that does not round 99.9% to 100%."""
    return MISSING if value is None else f"{value:.1%}"


def in_count(value: float | None) -> str:
    """Returns an integer with thousands separators, such as `1,234`."""
    return f"{value:,}" if is_number(value) else MISSING


def digits(value: float | None) -> str:
    """Returns three significant digits, and all digits before the decimal point."""
    if not is_number(value):
        return MISSING
    for limit, places in ((0.001, 6), (0.01, 5), (0.1, 4), (0.9995, 3), (9.995, 2), (99.95, 1)):
        if abs(value) < limit:
            text = f"{value:.{places}f}"
            return text.rstrip("0").rstrip(".")
    return f"{value:,.0f}"


def is_number(value: Any) -> TypeGuard[float]:
    """Returns whether a value is a number; booleans are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _scaled(value: float | None, base: int, units: tuple[str, ...]) -> str:
    if not is_number(value):
        return MISSING
    index = 0
    while abs(value) >= base * 0.9995 and index < len(units) - 1:
        value /= base
        index += 1
    return f"{digits(value)} {units[index]}".rstrip()
