"""The web application of the planning page: what may be chosen, plans, and pages to save."""

from __future__ import annotations

import pathlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from lingvo_gshard.core import UserError, registry, remat_policy
from lingvo_gshard.sharding import strategies
from lingvo_gshard.training import precision
from lingvo_gshard.wings.planning import picture
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.serving import border
from lingvo_gshard.wings.serving.bodies import parse, read_bytes
from lingvo_gshard.wings.serving.errors import RequestError, json_response
from lingvo_gshard.wings.serving.metrics import Metrics
from lingvo_gshard.wings.serving.origins import Origins
from lingvo_gshard.wings.serving.page import response
from lingvo_gshard.wings.serving.planning import page
from lingvo_gshard.wings.serving.planning.jobs import DONE, PlanJobs
from lingvo_gshard.wings.serving.planning.requests import PlanRequest, dispatch_names

# A config.json has some kilobytes.
_MOST_BYTES = 1 << 20
_SECONDS = 30.0
_BAD_REQUEST, _NOT_FOUND = 400, 404
# Combinations of strategies that the form suggests; others may be typed.
_COMBINED = ("expert_fsdp", "expert_tensor", "tensor_fsdp", "expert_tensor_fsdp")


def configs_in(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns name -> file of the configs in a folder; none if there is no such folder."""
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def configs_of_the_source_tree() -> pathlib.Path:
    """Returns the folder of configs of a clone. An installed package has none."""
    return pathlib.Path(__file__).parents[4] / "docs" / "planned" / "configs"


def make_app(jobs: PlanJobs, origins: Origins, metrics: Metrics | None = None) -> ASGIApp:
    """Returns the application."""
    metrics = metrics or Metrics(lambda: jobs.waiting)

    async def show(request: Request) -> Response:
        return response(page.to_html())

    async def choices(request: Request) -> Response:
        return json_response(_choices(jobs.configs))

    async def submit(request: Request) -> Response:
        body = await read_bytes(request, _MOST_BYTES, _SECONDS)
        asked = parse(body, PlanRequest, _BAD_REQUEST)
        try:
            return json_response(jobs.submit(asked).to_record())
        except UserError as error:
            raise RequestError(_BAD_REQUEST, str(error)) from None

    async def listed(request: Request) -> Response:
        return json_response({"plans": [job.to_record() for job in jobs.all()]})

    async def one(request: Request) -> Response:
        job = jobs.get(request.path_params["key"])
        if job is None:
            raise RequestError(_NOT_FOUND, "there is no such plan; it may have been dropped")
        return json_response(job.to_record(with_answer=True))

    async def remove(request: Request) -> Response:
        if not jobs.remove(request.path_params["key"]):
            raise RequestError(_NOT_FOUND, "there is no such plan; it may have been dropped")
        return json_response({})

    async def saved(request: Request) -> Response:
        keys = request.query_params.get("plans", "")
        text = await run_in_threadpool(_saved, jobs, keys)
        name = "plan.html" if "," not in keys else "comparison.html"
        headers = {"Content-Disposition": f"attachment; filename={name}"}
        return HTMLResponse(text, headers=headers)

    async def counted(request: Request) -> Response:
        text, media_type = metrics.text()
        return Response(text, media_type=media_type)

    answers: list[tuple[str, str, Callable[[Request], Awaitable[Response]]]] = [
        ("/", "GET", show),
        ("/api/choices", "GET", choices),
        ("/api/plans", "POST", submit),
        ("/api/plans", "GET", listed),
        ("/api/plans/{key}", "GET", one),
        ("/api/plans/{key}", "DELETE", remove),
        ("/saved", "GET", saved),
        ("/metrics", "GET", counted),
    ]
    routes = [Route(path, answer, methods=[method]) for path, method, answer in answers]
    paths = dict.fromkeys(path for path, _, _ in answers)
    app = border.make_app(routes, f"this server has {', '.join(paths)}", origins)
    return metrics.measured(app, frozenset(paths))


def _choices(configs: Mapping[str, pathlib.Path]) -> dict[str, Any]:
    """Returns what the form offers."""
    return {
        "experiments": [
            {"name": name, "about": registry.describe(name).partition("\n")[0]}
            for name in registry.names()
        ],
        "configs": list(configs),
        "topologies": topologies.records(),
        "strategies": [*strategies.base_names(), *_COMBINED],
        "precisions": precision.precision_names(),
        "policies": list(remat_policy.POLICIES),
        "dispatches": dispatch_names(),
    }


def _saved(jobs: PlanJobs, keys: str) -> str:
    """Returns a page of one plan, or a comparison. Raises RequestError if one is not done."""
    plans, names = [], []
    for key in filter(None, dict.fromkeys(keys.split(","))):
        job = jobs.get(key)
        if job is None or job.state != DONE or job.answer is None:
            raise RequestError(_NOT_FOUND, f"there is no finished plan {key[:20]!r}")
        plans += job.answer.plans
        names += [job.request.model] * len(job.answer.plans)
    if not plans:
        raise RequestError(_BAD_REQUEST, "plans is empty; ids separated by commas were expected")
    if len(plans) == 1:
        return picture.to_html(plans[0])
    return page.comparison_to_html(plans, names)
