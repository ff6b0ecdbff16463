"""Proves that a partitioned training step computes what the same step computes on one device.

This command runs one training step twice, over a mesh and on one device, and compares the results
of all layers, the loss, the metrics, every gradient, every new weight and every moment:

    gshard-verify --experiment=translation.quickstart --mesh=data=4,model=2 \\
        --strategy=expert_tensor

It prints "equal to 3e-15" and exits with

    0 if all is equal
    1 after an error, such as a wrong flag
    2 if a tensor differs; the first one is named
    3 if all that was compared is equal, but a part of the step cannot be
        compared. "not verified" begins the lines that say which part, and why

For the first tensor that differs it prints

    the size of the difference, and the element that differs most
    the line that computes the tensor
    the likely cause, if the values show one: copies whose sum is missing, a
        multiple, shards in another order, a carry or a norm of one shard,
        dropped parts, rounding, random numbers without a key of the step.
        Otherwise the evidence: the mesh axes that it depends on
    the nearest annotation or manual region, with the line of code that made it
    the collectives that were compiled for the tensor's layer

No accelerator and no data are needed. Devices are virtual CPU devices, the batch is synthetic, and
all arithmetic of float32 is done in float64: a difference is not due to rounding. Large experiments
are made small, and all changes are printed; --noshrink keeps the sizes. This command cannot know
the sizes of your own layers; set them by --gin_param:

    gshard-verify --experiment=my_package.my_module.my_experiment --mesh=data=4,model=2 \\
        --gin_param='task.my_layer.my_size = 16'

--kernels=tpu or --kernels=cuda has attention computed by the kernels of this platform:

    gshard-verify --experiment=translation.quickstart --mesh=data=2,model=2 \\
        --strategy=data_tensor --kernels=tpu --gin_param='input.source_length = 128'

--plan verifies the step of a file that gshard-plan --json wrote, with its mesh and strategy.

In Python, lingvo_gshard.verify does the same. docs/verification.md explains what is compared.
"""

from __future__ import annotations

import functools

import msgspec

from lingvo_gshard.api.partitioning import verify
from lingvo_gshard.tools.console import output, startup
from lingvo_gshard.tools.console.stages import stages_on_terminal
from lingvo_gshard.tools.flags.definitions import maker
from lingvo_gshard.tools.flags.options import given_options, option_flags
from lingvo_gshard.tools.flags.planned import plan_flag, planned_training, requested_params
from lingvo_gshard.tools.flags.run import EXPERIMENT
from lingvo_gshard.wings.verification.experiment import VerifyOptions

NAME = "gshard-verify"
# Exit code of a comparison that found a difference. An error has exit code 1.
DIFFERENT = 2
# Exit code if nothing differs, but a part of the step was not compared.
NOT_VERIFIED = 3

define_flags = maker(
    **EXPERIMENT, plan=plan_flag(), **option_flags(VerifyOptions()), json=output.json_flag()
)


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises UserError for a user's mistake.

    The exit code is 0 if all tensors are equal, `DIFFERENT` if one is not, and `NOT_VERIFIED` if a
    part of the step was not compared.
    """
    values = startup.parse_flags(define_flags(), argv, __doc__)
    output.check_writable(values, "json")
    console = output.make_console(values.json)
    say = functools.partial(output.say, console)
    params = requested_params(values, planned_training(values), say)
    with stages_on_terminal() as stages:
        found = verify(params, progress=stages, **given_options(values, VerifyOptions))
    for line in found.lines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    record = {"equal": found.is_equal, "largest": found.largest.difference.relative}
    output.write_json(values.json, record | msgspec.to_builtins(found))
    if not found.is_equal:
        return DIFFERENT
    return NOT_VERIFIED if found.not_verified else 0
