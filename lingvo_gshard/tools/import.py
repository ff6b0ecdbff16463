"""Imports a published model: makes a run from a directory of Hugging Face's libraries."""

# ruff: noqa: N999  the command gives the name.

from __future__ import annotations

import dataclasses
import pathlib
import time

from lingvo_gshard.api.experiments import describe
from lingvo_gshard.api.importing import import_model, open_model
from lingvo_gshard.core import UserError
from lingvo_gshard.runtime import devices
from lingvo_gshard.tools.console import output, startup
from lingvo_gshard.tools.flags.definitions import integer, maker, string
from lingvo_gshard.tools.flags.run import IGNORE_KEYS, SETTINGS
from lingvo_gshard.training import precision
from lingvo_gshard.wings.inference.published_settings import SETTINGS_FILE, PublishedSettings
from lingvo_gshard.wings.services.progress import StageDisplay

define_flags = maker(
    **{"from": "Directory of the published model."},
    logdir="Directory of the new run.",
    length=integer(
        "Positions of a row in training, and of a generated text; 0: those that the model was "
        "made for, 1,024 at most.",
        0,
        0,
    ),
    precision=string(
        "Types of weights and activations, as step.precision: "
        f"{', '.join(precision.precision_names())}.",
        "float32",
        precision.precision_names(),
    ),
    ignore_keys=IGNORE_KEYS,
    **SETTINGS,
    params="Prints the hyperparameters as gin, with their meaning, and exits. With a value "
    "only those whose path contains it.",
    json=output.json_flag("what was imported"),
)


def main(argv: list[str]) -> int:
    """Runs the command and returns its exit code. Raises ValueError for a user's mistake."""
    devices.keep_pages()
    values = startup.parse_flags(define_flags(), argv, __doc__, __name__)
    output.check_writable(values, "json")
    console = output.make_console(values.json)
    source = values["from"].value
    if not source:
        raise UserError("--from is missing: the directory of the published model")
    options = {
        "length": values.length,
        "precision": values.precision,
        "settings": values.gin_param,
        "gin_files": values.gin_file,
        "ignore_keys": values.ignore_keys,
    }
    if values.params is not None:
        print(describe(open_model(source, **options), values.params), end="")
        return 0
    if not values.logdir:
        raise UserError("--logdir is missing: the directory of the new run")
    started = time.monotonic()
    with StageDisplay(console) as progress:
        progress.begin("Importing")
        found = import_model(source, values.logdir, **options)
    seconds = time.monotonic() - started
    console.say(
        f"Imported {found.parameters:,} weights of {found.experiment} from {found.tensors:,} "
        f"tensors ({found.bytes / 1e6:,.1f} MB) in {seconds:.1f} s; the run is in {found.logdir}"
    )
    _say_settings(console, PublishedSettings.read(pathlib.Path(source)))
    if found.left_out:
        console.say(
            f"{found.left_out:,} tensors were left out: nothing in the run computes with them. "
            "docs/open_models.md says which they are"
        )
    output.write_json(values.json, dataclasses.asdict(found) | {"seconds": seconds})
    return 0


def _say_settings(console: output.Console, settings: PublishedSettings) -> None:
    """Shows the settings of generation_config.json that have an effect, and those without."""
    if settings.fields:
        fields = ", ".join(f"{name}={value}" for name, value in settings.fields.items())
        console.say(f"Texts are generated with {fields}, unless flags say otherwise")
    for name, why in settings.left_out.items():
        console.say(f"{SETTINGS_FILE}: {name} has no effect: {why}")
