"""Serves the planning page of gshard-plan --serve."""

from __future__ import annotations

import functools
import pathlib

from absl import flags

from lingvo_gshard.core import UserError
from lingvo_gshard.tools.console import output, warn
from lingvo_gshard.tools.flags import definitions, program

# Seconds for answers under way after a signal to stop.
_DRAIN_SECONDS = 2.0
# Flags that say what to plan: the page asks for it instead.
_OF_ONE_PLAN = ("experiment", "config", "topology", "json", "html", "search", "generate")


# --serve and the flags that only apply to it.
PAGE_FLAGS: definitions.Flags = dict(
    serve=definitions.switch("Serves a page on which one plans in a browser."),
    host=definitions.string(
        "Address that the page is served at, with --serve. Plans take minutes of this "
        "machine, so open it to others with care.",
        "127.0.0.1",
    ),
    port=definitions.integer("Port, with --serve; 0 takes a free one.", 8010, 0, 65535),
    port_file="File that the port is written to when the page is served, with --serve.",
    allow_host=definitions.repeated(
        "Further names of the machine, with --serve; may be repeated.", []
    ),
    plan_seconds=definitions.decimal(
        "Longest time that a plan may take, with --serve.", 3600.0, 1.0
    ),
    plan_gib=definitions.decimal(
        "Most memory of a plan's processes, with --serve; 0: three quarters of the machine's.",
        0.0,
        0.0,
    ),
    configs="Directory with config.json files that the page offers, with --serve; by default "
    "those of the source tree.",
)


def run(values: flags.FlagValues) -> int:
    """Serves the page until Ctrl-C. Returns the exit code. UserError for a wrong flag or port."""
    definitions.refuse(values, _OF_ONE_PLAN, "has no effect on --serve: the page asks what to plan")
    output.check_writable(values, "port_file")
    # Whether the extra is installed is known before anything else.
    from lingvo_gshard.wings.serving.metrics import Metrics
    from lingvo_gshard.wings.serving.origins import Origins
    from lingvo_gshard.wings.serving.planning import app
    from lingvo_gshard.wings.serving.planning.jobs import PlanJobs
    from lingvo_gshard.wings.serving.planning.process import PlanLimits, PlanProcess
    from lingvo_gshard.wings.serving.server import AppServer, ServerOptions, bind

    folder = pathlib.Path(values.configs) if values.configs else app.configs_of_the_source_tree()
    if values.configs and not folder.is_dir():
        raise UserError(f"--configs={values.configs}: there is no such directory")
    origins = Origins.of(values.host, values.allow_host)
    most = int(values.plan_gib * 2**30) or PlanLimits().bytes
    limits = PlanLimits(values.plan_seconds, most)
    configs = app.configs_in(folder)
    planner = PlanProcess(configs, program.compiling_settings(values), limits)
    with bind(values.host, values.port) as bound:
        jobs = PlanJobs(configs, planner)
        metrics = Metrics(lambda: jobs.waiting)

        on_ready = functools.partial(output.announce, values, bound.getsockname()[1])
        options = ServerOptions(_DRAIN_SECONDS)
        web = app.make_app(jobs, origins, metrics)
        AppServer(web, metrics, options, warn, on_ready).run(sockets=[bound])
        jobs.close()
    return 0
