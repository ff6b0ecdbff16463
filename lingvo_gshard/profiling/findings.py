"""Says in sentences what stands out in a profile, and what to do about it."""

from __future__ import annotations

from lingvo_gshard.planning.kinds import COLLECTIVES
from lingvo_gshard.profiling.profile import HOST, INPUT_WAIT, PAUSES, Profile

# Smaller parts are not worth a sentence, unless they are the largest.
_LEAST_SHARE = 0.2

_ADVICE = {
    INPUT_WAIT: (
        "The run is input-bound: the devices wait for batches. input.prefetch_batches sets how "
        "many batches are made in advance, which helps if some take longer than others. If most of "
        "the wait remains, batches are made more slowly than they are used: prepare the data "
        "before the run, or give the input a core of its own."
    ),
    COLLECTIVES: (
        "The devices wait for communication that no computation hides. gshard-plan --search looks "
        "for a sharding with less of it, and the table of collectives names the axes."
    ),
    HOST: (
        "The devices wait for the host, which starts steps, reads metrics and saves checkpoints. "
        "Profile steps without a checkpoint between them. Short steps need larger batches, or "
        "fewer log lines: trainer.log_every_steps."
    ),
    PAUSES: (
        "The devices pause between operations. Larger batches make operations longer; on a CPU, "
        "more devices than cores wait for each other."
    ),
}


def of_profile(profile: Profile) -> list[str]:
    """Returns sentences on the largest part, and on each other part that takes much of the time."""
    if not profile.parts:
        return []
    parts = sorted(profile.parts, key=lambda part: -part.seconds)
    first = parts[0]
    found = [f"Largest part: {first.part}, {first.share:.0%} of the step."]
    for part in parts:
        if part.part in _ADVICE and (part is first or part.share >= _LEAST_SHARE):
            found.append(_ADVICE[part.part])
    return found
