"""PlanRequest: says what to plan. It may come from anywhere, and runs no code."""

from __future__ import annotations

import contextlib
import hashlib
import json
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lingvo_gshard.api.experiments import experiment
from lingvo_gshard.api.importing import open_model
from lingvo_gshard.core import Params, UserError, names, registry
from lingvo_gshard.training import precision
from lingvo_gshard.wings.planning.machines import topologies

Number = Annotated[int, Meta(ge=0, le=10**9)]
# Lists of plans show these texts.
_Name = Annotated[str, Meta(max_length=200)]
_Table = Annotated[str, Meta(max_length=4_000)]


class PlanRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says what to plan. One of `experiment`, `config` and `content` names the model.

    Attributes:
      topology: the machine.
      config: name of a config that the server offers.
      content: a config.json.
      title: what the page calls the content.
      mesh: axes and sizes; empty for the experiment's, else one axis of all devices.
      strategy: name or table of a strategy; empty for the experiment's.
      batch_rows: rows of a batch; 0 for the experiment's.
      length: positions of a row of a config; 0 for what the model was made for.
      precision: types of weights and activations; empty for the experiment's.
      mode: "plan" plans this sharding, "search" searches the fastest one.
    """

    topology: _Name
    experiment: _Name = ""
    config: _Name = ""
    content: dict[str, Any] | None = None
    title: _Name = ""
    mesh: _Name = ""
    strategy: _Table = ""
    batch_rows: Number = 0
    length: Number = 0
    precision: _Name = ""
    mode: Literal["plan", "search"] = "plan"

    @property
    def key(self) -> str:
        """A name that only equal requests have."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[:16]

    @property
    def model(self) -> str:
        """The model in words."""
        return self.experiment or self.config or self.title or "config.json"

    def check(self, configs: Mapping[str, pathlib.Path]) -> None:
        """Raises UserError if it does not say which model, or names a machine there is not."""
        given = [bool(self.experiment), bool(self.config), self.content is not None]
        if sum(given) != 1:
            raise UserError(
                f"{sum(given)} models are given; one of experiment, config and content was expected"
            )
        # Any other name would have its module imported.
        for name, value, known in (
            ("experiment", self.experiment, registry.names()),
            ("config", self.config, tuple(configs)),
            ("precision", self.precision, tuple(precision.precision_names())),
        ):
            if value and value not in known:
                raise UserError(f"{name} is {value!r}. {names.nearest(value, known)}")
        topologies.get(self.topology)

    def params(self, configs: Mapping[str, pathlib.Path]) -> Params:
        """Returns the Params of the model. Raises UserError if it is unknown or not understood."""
        if self.experiment:
            return experiment(self.experiment, settings=self._settings(self.precision))
        with contextlib.ExitStack() as stack:
            path = configs.get(self.config)
            if path is None:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                path = pathlib.Path(folder) / "config.json"
                path.write_text(json.dumps(self.content), encoding="utf-8")
            return open_model(
                path,
                length=self.length,
                precision=self.precision or "bfloat16",
                settings=self._settings(""),
            )

    def _settings(self, precision: str) -> list[str]:
        rows = [f"input.batch_rows = {self.batch_rows}"] if self.batch_rows else []
        return rows + ([f"step.precision = {precision!r}"] if precision else [])
