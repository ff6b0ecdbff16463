"""Draws a plan as a self-contained HTML page: charts, a time line and every tensor on the mesh."""

from __future__ import annotations

from lingvo_gshard.wings.pages import html_page
from lingvo_gshard.wings.planning.plan.plan import Plan

# In order: a script uses only earlier scripts.
_PAGES, _HERE = "lingvo_gshard.wings.pages", "lingvo_gshard.wings.planning.picture"
_STYLES = ((_PAGES, "reset.css"), (_PAGES, "base.css"), (_HERE, "style.css"))
_SCRIPTS = (
    *((_PAGES, f"{name}.js") for name in ("units", "dom", "table", "bars", "mesh")),
    *((_HERE, f"{name}.js") for name in ("time_line", "sections", "main")),
)


def to_html(plan: Plan) -> str:
    """Returns the page of a plan as text."""
    data = {"plan": plan, "mesh": html_page.describe(plan.mesh, plan.devices, plan.tensors)}
    return html_page.make(f"{plan.name} on {plan.topology}", _STYLES, _SCRIPTS, data)
