"""Reads whole numbers from names of files and from options."""

# Larger numbers do not fit into 64 bits, which msgspec, Orbax and ports of sockets expect.
_MOST_DIGITS = 18


def whole_number(text: str) -> int | None:
    """Returns the number that a text spells as `str` does; None for any other text.

    `str.isdigit` alone accepts texts that `int` refuses, such as "²", and texts that name another
    file than the number does, such as "007".
    """
    is_one = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    return int(text) if is_one and (text == "0" or text[0] != "0") else None
