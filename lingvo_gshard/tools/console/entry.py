"""Entry points of the commands: watch signals before anything that is slow is imported."""

import pathlib
import sys

from lingvo_gshard.tools.console import process_start
from lingvo_gshard.tools.console.process_start import SignalWatch


def run_script() -> None:
    """Entry point of every console script: runs the tool that the script is named after."""
    process_start.open_closed_streams()
    with SignalWatch(pathlib.Path(sys.argv[0]).stem):
        from lingvo_gshard.tools.console import launcher

        launcher.run_script()


def run_module() -> None:
    """Entry point of `python -m lingvo_gshard`: runs the tool that the first argument names."""
    process_start.open_closed_streams()
    with SignalWatch("-".join(["gshard", *sys.argv[1:2]])):
        from lingvo_gshard.tools.console import launcher

        launcher.run_module()
