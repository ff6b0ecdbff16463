"""Serves the planning page of gshard-plan --serve."""

from __future__ import annotations

import pathlib
import socket

from absl import flags

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.console.libraries import warn
from lingvo_gshard.tools.flags import program

# Flags that say what to plan: the page asks for it instead.
_OF_ONE_PLAN = ("experiment", "config", "topology", "json", "html", "search", "generate")


def define_flags(values: flags.FlagValues) -> None:
    """Defines --serve and the flags that only apply to it."""
    flags.DEFINE_boolean(
        "serve", False, "Serves a page on which one plans in a browser.", flag_values=values
    )
    flags.DEFINE_string(
        "host",
        "127.0.0.1",
        "Address that the page is served at, with --serve. Plans take minutes of this machine, so "
        "open it to others with care.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "port", 8010, "Port, with --serve; 0 takes a free one.", 0, 65535, flag_values=values
    )
    flags.DEFINE_string(
        "port_file",
        None,
        "File that the port is written to when the page is served, with --serve.",
        flag_values=values,
    )
    flags.DEFINE_multi_string(
        "allow_host",
        [],
        "Further names of the machine, with --serve; may be repeated.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "configs",
        None,
        "Directory with config.json files that the page offers, with --serve; by default those of "
        "the source tree.",
        flag_values=values,
    )


def run(values: flags.FlagValues) -> int:
    """Serves the page until Ctrl-C. Returns the exit code.

    Raises:
      UserError: a flag has no effect on the page, or the port is taken.
    """
    for name in _OF_ONE_PLAN:
        if values[name].present:
            raise UserError(f"--{name} has no effect on --serve: the page asks what to plan")
    output.check_writable(values, "port_file")
    # Whether the extra is installed is known before anything else.
    import uvicorn

    from lingvo_gshard.serving.origins import Origins
    from lingvo_gshard.serving.planning import app
    from lingvo_gshard.serving.planning.jobs import PlanJobs
    from lingvo_gshard.serving.server import bind

    folder = pathlib.Path(values.configs) if values.configs else app.configs_of_the_source_tree()
    if values.configs and not folder.is_dir():
        raise UserError(f"--configs={values.configs}: there is no such directory")
    origins = Origins.of(values.host, values.allow_host)
    jobs = PlanJobs(app.configs_in(folder), program.compiling_settings(values))
    with bind(values.host, values.port) as bound:
        options = uvicorn.Config(
            app.make_app(jobs, origins), log_level="warning", lifespan="off", server_header=False
        )
        server = uvicorn.Server(options)
        start = server.startup

        async def started(sockets: list[socket.socket] | None = None) -> None:
            await start(sockets)
            _announce(values, bound.getsockname()[1])

        server.startup = started
        server.run(sockets=[bound])
    jobs.close()
    return 0


def _announce(values: flags.FlagValues, port: int) -> None:
    """Says where the page is, now that it is served."""
    if values.port_file:
        output.write_text(values.port_file, f"{port}\n", "port_file")
    host = f"[{values.host}]" if ":" in values.host else values.host
    warn(f"http://{host}:{port}/  Ctrl-C stops")
