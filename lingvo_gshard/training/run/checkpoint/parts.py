"""The parts of a training state that a checkpoint holds, one item each."""

from __future__ import annotations

from lingvo_gshard.training.step import local_updates

# Part of a state -> its name in messages.
PART_NAMES = {
    "theta": "weights",
    "moments": "optimizer moments",
    "averages": "averages of weights",
    "loss_scale": "loss scale",
    "spikes": "statistics of spikes",
    local_updates.WORKERS: "states of the workers",
    local_updates.OUTER: "moments of the outer optimizer",
}
# The parts of a state that `run.json` holds.
IN_RUN_RECORD = ("step", "stopped")
# The file in a checkpoint that has the run's Params.
PARAMS_COPY = "run/params.txt"
