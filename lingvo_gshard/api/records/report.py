"""report: what runs have left in their directories, as data and as a page."""

from __future__ import annotations

import os
from collections.abc import Sequence

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.files import objects
from lingvo_gshard.reporting import page
from lingvo_gshard.reporting.report import Report, read_report


def report(
    logdir: str | os.PathLike | Sequence[str | os.PathLike],
    *,
    html: str | os.PathLike | None = None,
) -> Report:
    """Returns what runs have left in their directories: curves, scores, sharding, environment.

    Nothing is computed with the model; a run may still be training.

    Args:
      logdir: directory of a run, or those of several to compare.
      html: file to write the report to as a page for browsers; None writes none.

    Raises:
      UserError: a directory holds no run or one without metrics, or `html` cannot be written.
    """
    is_one = isinstance(logdir, (str, os.PathLike))
    found = read_report([logdir] if is_one else list(logdir))
    if html is not None:
        try:
            objects.write_bytes(html, page.to_html(found).encode())
        except OSError as error:
            raise UserError(f"`html={html}` cannot be written: {error.strerror}") from None
    return found
