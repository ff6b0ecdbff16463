"""gshard-train with the tiny experiment registered; tests run it as a subprocess."""

import sys

from lingvo_gshard.core.config import registry
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.tools import train
from lingvo_gshard.tools.console import process_start, startup
from lingvo_gshard.tools.console.process_start import SignalWatch
from tests import tiny


@registry.register("test.tiny")
def tiny_experiment() -> Params:
    """Names the largest of six numbers, in a second.

    gshard-train --experiment=test.tiny --logdir=runs/tiny
    """
    return tiny.experiment_params()


if __name__ == "__main__":
    process_start.open_closed_streams()
    with SignalWatch(train.NAME):
        sys.exit(startup.guarded(train.NAME, train.main)(sys.argv))
