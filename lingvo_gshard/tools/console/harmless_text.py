"""Text that does nothing to a terminal but appear on it."""

from __future__ import annotations

import re
import sys

from lingvo_gshard.tools.console.spelling import with_flags

# Control characters (ISO/IEC 6429: C0, DEL and C1), but for the tab and the line break.
_COMMANDS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def harmless(text: str) -> str:
    """Returns a text without characters that command a terminal, such as those of colors.

    Line breaks and tabs stay. The others are written as Python writes them: \\x1b for Escape.
    """
    return _COMMANDS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def warn(text: str) -> None:
    """Writes a line to standard error and flushes it.

    Options are spelled as flags, and nothing in the text commands the terminal.
    """
    print(harmless(with_flags(text)), file=sys.stderr, flush=True)
