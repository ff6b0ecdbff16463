"""Reports on the experts of a trained model, and adds, prunes or places experts.

    gshard-experts report --logdir=runs/quickstart --html=experts.html
    gshard-experts watched --logdir=runs/quickstart
    gshard-experts upcycle --logdir=runs/quickstart_dense --output=runs/upcycled --experts=8
    gshard-experts prune --logdir=runs/quickstart --languages=de,nl --output=runs/de_nl
    gshard-experts place --logdir=runs/quickstart --plan=plan.json --output=runs/placed

report shows which experts each language uses, how even their load is, and how many tokens are
dropped. watched shows what training saw of the routers, step by step. upcycle makes a model with
experts from a dense one; each expert is a copy of the feed-forward layer that it replaces. prune
keeps only the experts that some languages use most. place puts the experts on the devices that a
plan advises.

Each subcommand has its own help: gshard-experts report --help. All but watched read the
Params, the vocabularies and the best or newest checkpoint of --logdir.
"""

from lingvo_gshard.tools.console import subcommands

SUBCOMMANDS = {
    name: f"lingvo_gshard.tools.experts.{name}"
    for name in ("report", "watched", "upcycle", "prune", "place")
}


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises UserError for a user's mistake."""
    return subcommands.run(argv, __doc__, SUBCOMMANDS)
