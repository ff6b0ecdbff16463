"""Draws a report as a self-contained HTML page: curves, scores, routers and tensors on the mesh."""

from __future__ import annotations

from lingvo_gshard.wings.pages import html_page
from lingvo_gshard.wings.reporting.runs_report import Report

_PAGES, _HERE = "lingvo_gshard.wings.pages", "lingvo_gshard.wings.reporting.page"
_STYLES = ((_PAGES, "reset.css"), (_PAGES, "base.css"), (_HERE, "style.css"))
# In order: a script uses only earlier scripts.
_SHARED = ("units", "dom", "table", "bars", "mesh")
_OWN = (
    *("runs", "axes", "line_chart", "heat_map"),
    *("headline", "curves", "scores", "routers", "profile", "sharding", "setup", "main"),
)
_SCRIPTS = (
    *((_PAGES, f"{name}.js") for name in _SHARED),
    *((_HERE, f"{name}.js") for name in _OWN),
)


def to_html(report: Report) -> str:
    """Returns the page of a report as text."""
    names = " and ".join(run.label for run in report.runs)
    experiments = dict.fromkeys(run.experiment for run in report.runs)
    return html_page.make(
        f"{', '.join(experiments)}: {names}", _STYLES, _SCRIPTS, {"report": report}
    )
