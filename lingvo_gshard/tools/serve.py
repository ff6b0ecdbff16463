"""Serves a trained model over HTTP: a JSON interface, and a page to try it."""

from __future__ import annotations

import pathlib

from absl import flags

from lingvo_gshard.api.run import load
from lingvo_gshard.core import UserError
from lingvo_gshard.tools.console import output, stages_with_lines, startup, warn
from lingvo_gshard.tools.flags import run as run_flags
from lingvo_gshard.tools.flags.definitions import (
    comma_list,
    decimal,
    integer,
    maker,
    string,
    switch,
)
from lingvo_gshard.tools.flags.options import option_flags, read_options
from lingvo_gshard.wings.serving.limits import Limits

define_flags = maker(
    logdir=run_flags.LOGDIR,
    checkpoint=run_flags.CHECKPOINT,
    host=string("Address to listen on; 0.0.0.0 for all networks of this machine.", "127.0.0.1"),
    port=integer("Port to listen on; 0 chooses a free one.", 8000, 0, 65535),
    port_file="File for the port, written when the server listens.",
    token_file="File with a bearer token that requests must bring; the page asks for it.",
    allow_host=comma_list(
        "Further names by which browsers and programs reach the server, besides --host; * for any."
    ),
    allow_origin=comma_list(
        "Origins of web pages that may use the server besides its own, such as "
        "https://app.example.com; * for any."
    ),
    **option_flags(Limits()),
    drain_seconds=decimal(
        "Seconds that requests under way have after a signal to stop.", 30.0, 1.0
    ),
    warm_up=switch("Compiles what most requests need before the first is accepted.", True),
    precision=run_flags.precision_flag(),
    **run_flags.runtime_flags(in_cluster=False),
)


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    values = startup.parse_flags(define_flags(), argv, __doc__, __name__)
    logdir = run_flags.required_logdir(values)
    output.check_writable(values, "port_file")
    hosts, sites = values.allow_host or [], values.allow_origin or []
    token = _token(values.token_file)
    # Whether the extra is installed, and the port is free, is known before the model is loaded.
    from lingvo_gshard.wings.serving import server
    from lingvo_gshard.wings.serving.origins import Origins

    origins = Origins.of(values.host, hosts, sites)
    bound = server.bind(values.host, values.port)
    with bound:
        with stages_with_lines() as stages:
            stages.begin("Loading the model")
            run = load(
                logdir,
                options=run_flags.runtime_options(values),
                precision=values.precision,
                checkpoint=values.checkpoint,
            )
            run.progress, run.compiles_elsewhere = stages, True
            run.compiler_seconds = values.stuck_seconds
            service = _service(values, run, token)
        port, model = bound.getsockname()[1], service.model

        def on_ready() -> None:
            run.is_serving = True
            output.announce(values, port, f"{model.name}, step {model.step:,}: ")

        options = server.ServerOptions(values.drain_seconds, origins)
        cut_off = server.run(service, bound, options, warn, on_ready)
    if cut_off:
        warn(f"{cut_off} requests were cut off after {values.drain_seconds:g} s")
    return int(cut_off > 0)


def _service(values: flags.FlagValues, run, token: str):
    """Returns the service of a run's model, loaded and compiled now."""
    from lingvo_gshard.wings.inference.programs.executables import CompilerStuckError
    from lingvo_gshard.wings.serving.model import DirectoryWatch, ServedModel, warm_up
    from lingvo_gshard.wings.serving.service import Service

    try:
        model = ServedModel.of_run(run)
        if values.warm_up:
            run.progress.begin("Compiling what most requests need")
            warm_up(model, min(4, values.most_beam_size), warn)
    except CompilerStuckError as error:
        raise UserError(
            f"{error}, the value of --stuck_seconds; give a larger one on a slow machine"
        ) from None
    limits = read_options(values, Limits)
    return Service(model, limits, token, DirectoryWatch(run.logdir, model.step, run.checkpoint))


def _token(path: str | None) -> str:
    """Returns the token in a file, or an empty text without a file."""
    if path is None:
        return ""
    try:
        token = pathlib.Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or "it is not text"
        raise UserError(f"--token_file={path} cannot be read: {said}") from None
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(
            f"--token_file={path}: one token of printable ASCII characters without spaces was "
            "expected"
        )
    return token
