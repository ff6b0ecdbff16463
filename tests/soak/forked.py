"""Imports gshard-train: the fork server loads this module before it forks."""

from lingvo_gshard.tools.console import startup

with startup.quiet_tensorflow():
    from lingvo_gshard.tools import train  # noqa: F401
