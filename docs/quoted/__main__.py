"""Compares figures of plans on the pages with today's plans.

    python -m docs.quoted
    python -m docs.quoted --page=training.md

plans what docs/quoted/quotes.toml names, and prints each passage that would be different today. It
ends with 1 if there is one. Passages whose compiler is not installed are named, too. A plan takes
10 to 40 s on a core.
"""

from __future__ import annotations

import argparse
import sys

from docs.quoted import quotes


def main() -> int:
    """Compares what the command line asks for, and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.quoted",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--page", default="", help="a page, such as training.md; default: all")
    page = parser.parse_args().page
    chosen = [quote for quote in quotes.load() if page in ("", quote.page)]
    if not chosen:
        parser.error(f"--page={page}: docs/quoted/quotes.toml has no quote of it")
    stale = 0
    for quote in chosen:
        if quote.missing:
            print(f"{quote.page}: no compiler of {', '.join(quote.missing)} is installed")
            continue
        now = quote.now()
        is_there = quote.is_on_page(now)
        stale += not is_there
        print(f"{quote.page}: {'equal' if is_there else 'today'}: {now}", flush=True)
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main())
