"""Draws the pictures of README.md and docs/ into docs/pictures/.

    python -m docs.pictures

draws those that follow from the code alone: how a weight is cut, and the all-to-all. A test holds
that the committed files are equal to what this draws.

    python -m docs.pictures --logdir=runs/quickstart

also draws the curves of that run. Which families of languages share experts is drawn from what
`gshard-experts report --json=experts.json` wrote:

    python -m docs.pictures --experts=experts.json

Which kinds of token the experts of a run get, and how further runs differ in the load of experts,
is drawn from what they watched of their routers while they trained:

    python -m docs.pictures --routers runs/quickstart runs/no_loss

What a study of experts found, if it has several models, and what a language gains from the text of
the others, if it has bilingual ones, is drawn from what `python -m studies experts` wrote to
--json=study.json:

    python -m docs.pictures --study=study.json

and what `python -m studies texts` wrote:

    python -m docs.pictures --texts=texts.json

Pictures of the planner's page are screenshots of a page that `gshard-plan --html` wrote; they need
Chromium:

    python -m docs.pictures --plan=plan.html

Those of a report are taken of a page that `gshard-report --html` wrote:

    python -m docs.pictures --report=report.html

and those of the page of a gshard-serve with the quickstart's model, and its driver:

    python -m docs.pictures --server=http://127.0.0.1:8000/

and those of the planning page of gshard-plan --serve:

    python -m docs.pictures --planning_page=http://127.0.0.1:8010/
"""

from __future__ import annotations

import argparse
import json
import pathlib

import lingvo_gshard
from docs.pictures import (
    all_to_all,
    curve,
    families,
    page_shots,
    planning_page,
    routing,
    server_page,
    study,
    texts,
    weight_cut,
)
from lingvo_gshard.wings.services.routers.router_records import routers_of_run

FOLDER = pathlib.Path(__file__).parent
# Pictures that follow from the code alone.
DRAWN = {"weight_cut.svg": weight_cut.draw, "all_to_all.svg": all_to_all.draw}


def main() -> None:
    """Draws the pictures that the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.pictures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--logdir", type=pathlib.Path, help="a run, to draw its curves")
    parser.add_argument("--experts", type=pathlib.Path, help="JSON of gshard-experts report")
    parser.add_argument(
        "--routers", type=pathlib.Path, nargs="+", help="runs; the first is what others change"
    )
    parser.add_argument("--study", type=pathlib.Path, help="JSON of python -m studies experts")
    parser.add_argument("--texts", type=pathlib.Path, help="JSON of python -m studies texts")
    parser.add_argument("--plan", type=pathlib.Path, help="a page of gshard-plan --html")
    parser.add_argument("--report", type=pathlib.Path, help="a page of gshard-report --html")
    parser.add_argument("--server", help="the address of a gshard-serve")
    parser.add_argument("--planning_page", help="the address of a gshard-plan --serve")
    given = parser.parse_args()
    for name, draw in DRAWN.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
    if given.logdir:
        run = lingvo_gshard.load(given.logdir)
        text = curve.draw(run.params.name, run.metrics())
        (FOLDER / "curve.svg").write_text(text, encoding="utf-8")
    if given.experts:
        report = json.loads(given.experts.read_text(encoding="utf-8"))
        text = families.draw(report["experiment"], report["layers"])
        (FOLDER / "families.svg").write_text(text, encoding="utf-8")
    if given.routers:
        watched = {logdir.name: routers_of_run(logdir) for logdir in given.routers}
        name, records = next(iter(watched.items()))
        text = routing.draw_classes(name, records)
        (FOLDER / "classes.svg").write_text(text, encoding="utf-8")
        if len(watched) > 1:
            (FOLDER / "routing.svg").write_text(routing.draw_changes(watched), encoding="utf-8")
    if given.study:
        runs = json.loads(given.study.read_text(encoding="utf-8"))
        if len({run["model"] for run in runs if not run["language"]}) > 1:
            (FOLDER / "study.svg").write_text(study.draw(runs), encoding="utf-8")
        if any(run["language"] for run in runs):
            (FOLDER / "gains.svg").write_text(study.draw_gains(runs), encoding="utf-8")
    if given.texts:
        runs = json.loads(given.texts.read_text(encoding="utf-8"))
        (FOLDER / "texts.svg").write_text(texts.draw(runs), encoding="utf-8")
    if given.plan:
        page_shots.take(given.plan, FOLDER, "planner", 1176, 1.5)
    if given.report:
        page_shots.take(given.report, FOLDER, "report", 1166, 1.0)
    if given.server:
        server_page.take(given.server, FOLDER)
    if given.planning_page:
        planning_page.take(given.planning_page, FOLDER)


if __name__ == "__main__":
    main()
