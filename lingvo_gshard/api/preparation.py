"""Prepares raw text for training: the pipeline's function and its options."""

from __future__ import annotations

import os
from collections.abc import Sequence

from lingvo_gshard.core import Params
from lingvo_gshard.wings.gin.binding import apply_gin
from lingvo_gshard.wings.preparation.pipeline import PrepareOptions, prepare
from lingvo_gshard.wings.preparation.preparation import Preparation
from lingvo_gshard.wings.preparation.sources import Source

__all__ = ["PrepareOptions", "Source", "preparation_params", "prepare"]


def preparation_params(
    settings: Sequence[str] = (), gin_files: Sequence[str | os.PathLike] = ()
) -> Params:
    """Returns the Params of a preparation, with settings applied.

        >>> settings = gshard.preparation_params(["cleaning.max_characters = 500"])
        >>> settings.cleaning.max_characters
        500

    Args:
      settings: gin statements, such as "cleaning.max_characters = 500"; applied after the files.
      gin_files: paths of gin files.

    Raises:
      UserError: a name or value is wrong. The message has the nearest valid name.
    """
    return apply_gin(Preparation.params(), [os.fspath(path) for path in gin_files], settings)
