"""Reports on the experts of a trained model, adds, prunes or places experts, and studies their use.

    gshard-experts report --logdir=runs/quickstart --html=experts.html
    gshard-experts watched --logdir=runs/quickstart
    gshard-experts upcycle --logdir=runs/quickstart_dense --output=runs/upcycled --experts=8
    gshard-experts prune --logdir=runs/quickstart --languages=de,nl --output=runs/de_nl
    gshard-experts place --logdir=runs/quickstart --plan=plan.json --output=runs/placed
    gshard-experts study --folder=runs/study

report shows which experts each language uses, how even their load is, and how many tokens are
dropped. watched shows what training saw of the routers, step by step. upcycle makes a model with
experts from a dense one; each expert is a copy of the feed-forward layer that it replaces. prune
keeps only the experts that some languages use most. place puts the experts on the devices that a
plan advises. study trains models with more and more experts and compares them.

Each subcommand has its own help: gshard-experts report --help. All but watched and study read the
Params, the vocabularies and the best or newest checkpoint of --logdir.
"""

from __future__ import annotations

from lingvo_gshard.core.config import names
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools.console import output, startup
from lingvo_gshard.tools.experts import place, prune, study, upcycle, watched
from lingvo_gshard.tools.experts import report as experts_report

NAME = "gshard-experts"
SUBCOMMANDS = {
    "report": experts_report,
    "watched": watched,
    "upcycle": upcycle,
    "prune": prune,
    "place": place,
    "study": study,
}


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    subcommand = next((a for a in argv[1:] if not a.startswith("-")), None)
    if subcommand is None and any(argument in startup.HELP for argument in argv[1:]):
        print(__doc__.strip())
        return 0
    if subcommand not in SUBCOMMANDS:
        given = f"{subcommand!r} is unknown" if subcommand else "is missing"
        raise UserError(f"the subcommand {given}. {names.nearest(subcommand or '', SUBCOMMANDS)}")
    module = SUBCOMMANDS[subcommand]
    values = module.define_flags()
    argv = [*argv[: argv.index(subcommand)], *argv[argv.index(subcommand) + 1 :]]
    startup.parse_flags(values, argv, module.__doc__)
    module.run(values, output.make_console(values.json))
    return 0
