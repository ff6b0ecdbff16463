"""gshard-train with the tiny experiment registered; run by the tests as a process of its own."""

from lingvo_gshard.tools.console import startup

startup.quiet_tensorflow()

from lingvo_gshard.core.config import registry  # noqa: E402
from lingvo_gshard.core.config.params import Params  # noqa: E402
from lingvo_gshard.tools import train  # noqa: E402
from tests import tiny  # noqa: E402


@registry.register("test.tiny")
def tiny_experiment() -> Params:
    """Names the largest of six numbers, in a second.

    gshard-train --experiment=test.tiny --logdir=runs/tiny
    """
    return tiny.experiment_params()


if __name__ == "__main__":
    train.run()
