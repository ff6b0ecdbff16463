"""Studies what experts and recipes are worth, and compares plans with the GShard paper's figures.

    python -m studies experts --folder=runs/study --seeds=1,2
    python -m studies texts --folder=runs/texts --more_seeds=2
    python -m studies recipes --folder=runs/recipes --compare=precisions
    python -m studies widths --folder=runs/widths
    python -m studies paper

experts compares translation models with more and more experts, texts language models. recipes
trains one model in several ways, such as precisions or optimizers, widths one in several widths
with several learning rates. paper plans the paper's experiments on its machines. These programs
belong to the source tree and run in its top folder. Each has its own help: python -m studies paper
--help.
"""

from __future__ import annotations

import sys

from lingvo_gshard.tools.console import launcher

NAME = "studies"
SUBCOMMANDS = {
    "experts": "studies.experts.command",
    "paper": "studies.paper.command",
    "recipes": "studies.recipes.command",
    "texts": "studies.texts.command",
    "widths": "studies.widths.command",
}


def main(argv: list[str]) -> int:
    """Runs the program and returns its exit code. Raises UserError for a user's mistake."""
    from lingvo_gshard.tools.console import subcommands

    return subcommands.run(argv, __doc__, SUBCOMMANDS, NAME)


if __name__ == "__main__":
    sys.exit(launcher.run(NAME, sys.argv, lambda: main))
