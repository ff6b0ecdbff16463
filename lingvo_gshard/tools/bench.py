"""Measures how fast programs run, compared with the device's rate for matrix products.

    gshard-bench step --json=step.json
    gshard-bench moe --json=moe.json
    gshard-bench exported train_step.zip --json=exported.json
    gshard-bench fill --experiment=language_model.one_gpu_dense --topology=gpu:h100:1x1 \\
        --folder=dense
    gshard-bench card dense --json=card.json
    gshard-bench input --prepared=prepared/large

`step` measures training steps of an experiment and of an encoder alone, and `moe` layers with
experts beside dense ones. `exported` runs a saved step with JAX alone. `fill` makes an experiment
as large as a card's memory allows by its plan, and `card` measures its step there beside the plan.
`input` reads prepared data. Each has its own help: gshard-bench step --help.

Comparisons with other engines, and of parts of this library, belong to the source tree:
python -m benchmarks decode.

The JSON is {"device": ..., "rows": [...]}. A class in the benchmark's file, in
lingvo_gshard/tools/benchmarks/, describes the fields of a row. --json alone writes the JSON
to standard output and the table to standard error.
"""

from __future__ import annotations

from lingvo_gshard.core import UserError, names
from lingvo_gshard.tools.console import subcommands

NAME = "gshard-bench"
SUBCOMMANDS = {
    "step": "lingvo_gshard.tools.benchmarks.step",
    "moe": "lingvo_gshard.tools.benchmarks.moe",
    "exported": "lingvo_gshard.tools.benchmarks.saved",
    "fill": "lingvo_gshard.tools.benchmarks.card.fill",
    "card": "lingvo_gshard.tools.benchmarks.card.command",
    "input": "lingvo_gshard.tools.benchmarks.reading",
}


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises UserError for a user's mistake."""
    if argv[1:2] == ["decode"]:
        valid = names.nearest("decode", SUBCOMMANDS)
        raise UserError(
            f"the subcommand 'decode' is unknown. {valid} The repository has python -m benchmarks "
            "decode"
        )
    return subcommands.run(argv, __doc__, SUBCOMMANDS)
