"""Numbers as engineers write them, for the terminal."""

from __future__ import annotations

from typing import Any

MISSING = "-"

_LARGE = ("", "thousand", "million", "billion", "trillion", "quadrillion")
_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FLOPS = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")


def in_bytes(value: float | None) -> str:
    """Returns `12 B`, `3.4 KiB`, `5.6 MiB`, ..."""
    return _scaled(value, 1024, _BYTES)


def in_flops(value: float | None) -> str:
    """Returns `12 FLOP`, `3.4 GFLOP`, `5.6 TFLOP`, ..."""
    return _scaled(value, 1000, _FLOPS)


def in_large(value: float | None) -> str:
    """Returns `1,234` or, from a million on, `5.6 million`, ..."""
    if is_number(value) and abs(value) < 999_500:
        return digits(value) if abs(value) < 100 else f"{value:,.0f}"
    return _scaled(value, 1000, _LARGE)


def in_seconds(value: float | None) -> str:
    """Returns `12 ns`, `3.4 us`, `5.6 ms` or `7.8 s`."""
    if not is_number(value):
        return MISSING
    for limit, unit in ((0.9995e-6, "ns"), (0.9995e-3, "us"), (0.9995, "ms")):
        if abs(value) < limit and value:
            return f"{digits(value * {'ns': 1e9, 'us': 1e6, 'ms': 1e3}[unit])} {unit}"
    return f"{digits(value)} s"


def in_share(value: float | None) -> str:
    """Returns a part of one in per cent."""
    if not is_number(value):
        return MISSING
    return f"{value:.0%}" if abs(value) >= 0.0995 else f"{value:.1%}"


def in_count(value: float | None) -> str:
    """Returns `1,234`."""
    return f"{value:,}" if is_number(value) else MISSING


def digits(value: float | None) -> str:
    """Returns three digits that count, or all those before the point."""
    if not is_number(value):
        return MISSING
    for limit, places in ((0.001, 6), (0.01, 5), (0.1, 4), (0.9995, 3), (9.995, 2), (99.95, 1)):
        if abs(value) < limit:
            text = f"{value:.{places}f}"
            return text.rstrip("0").rstrip(".")
    return f"{value:,.0f}"


def is_number(value: Any) -> bool:
    """Whether it is a number, which true and false are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _scaled(value: float | None, base: int, units: tuple[str, ...]) -> str:
    if not is_number(value):
        return MISSING
    index = 0
    while abs(value) >= base * 0.9995 and index < len(units) - 1:
        value /= base
        index += 1
    return f"{digits(value)} {units[index]}".rstrip()
