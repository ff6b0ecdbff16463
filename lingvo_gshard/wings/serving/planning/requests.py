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
from lingvo_gshard.core import Params, UserError, names, registry, remat_policy
from lingvo_gshard.training import precision
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.planning.search.choices import DISPATCHES, ChoicePaths

Number = Annotated[int, Meta(ge=0, le=10**9)]
# Lists of plans show these texts.
_Name = Annotated[str, Meta(max_length=200)]
_Table = Annotated[str, Meta(max_length=4_000)]
_Amount = Annotated[float, Meta(ge=0, le=1e18)]
# Names of dispatches -> their classes. Buffers have room for uneven loads if no factor is set.
_DISPATCHES = {"dropless": DroplessDispatch} | {
    cls.__name__.removesuffix("Dispatch").lower(): cls for cls in DISPATCHES
}
_CAPACITY_FACTOR = 1.25
PLAN, SEARCH, GENERATE = "plan", "search", "generate"
# Types of a config's weights and activations, by mode.
_PRECISIONS = {PLAN: "bfloat16", SEARCH: "bfloat16", GENERATE: "bfloat16_weights"}


class PlanRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says what to plan. One of `experiment`, `config` and `content` names the model.

    Attributes:
      config: name of a config that the server offers.
      content: a config.json.
      title: what the page calls the content.
      mesh: axes and sizes; empty for the experiment's, else one axis of all devices.
      strategy: name or table of a strategy; empty for the experiment's.
      batch_rows: rows of a batch; 0 for the experiment's. In generation, texts that are decoded
        together; 0 for one text on each part of the mesh that splits a batch.
      length: positions of a row of a config; 0 for what the model was made for.
      precision: types of weights and activations; empty for the experiment's.
      rematerialize: what the backward pass recomputes; empty for the experiment's.
      dispatch: how rows reach experts, a name of `dispatch_names`; empty for the experiment's.
      micro_batches: parts of a batch whose gradients are summed; 0 for the experiment's.
      tokens: tokens to train on, or to generate; 0 for a billion.
      price: of a chip for an hour; 0 for its list price.
      mode: "plan" plans this sharding, "search" searches the fastest one, "generate" plans the
        decoding of texts.
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
    rematerialize: _Name = ""
    dispatch: _Name = ""
    micro_batches: Number = 0
    tokens: _Amount = 0.0
    price: _Amount = 0.0
    mode: Literal["plan", "search", "generate"] = "plan"

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
            ("rematerialize", self.rematerialize, tuple(remat_policy.POLICIES)),
            ("dispatch", self.dispatch, dispatch_names()),
        ):
            if value and value not in known:
                raise UserError(f"{name} is {value!r}. {names.nearest(value, known)}")
        topologies.get(self.topology)

    def params(self, configs: Mapping[str, pathlib.Path]) -> Params:
        """Returns the Params of the model. Raises UserError if it is unknown or not understood."""
        params = self._model_params(configs)
        paths = ChoicePaths.of(params)
        if self.rematerialize:
            for path in paths.rematerialize:
                params.set_path(path, self.rematerialize)
        if self.dispatch:
            for path in (*paths.dispatch, *paths.dropless):
                params.set_path(path, _DISPATCHES[self.dispatch].params())
                router = params.get(path.rpartition(".")[0]).router
                if "capacity_factor" in router and not router.capacity_factor:
                    router.capacity_factor = _CAPACITY_FACTOR
        return params

    def _model_params(self, configs: Mapping[str, pathlib.Path]) -> Params:
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
                precision=self.precision or _PRECISIONS[self.mode],
                settings=self._settings(""),
            )

    def _settings(self, precision: str) -> list[str]:
        values = {
            "input.batch_rows": 0 if self.mode == GENERATE else self.batch_rows,
            "step.micro_batches": self.micro_batches,
            "step.precision": precision,
        }
        return [f"{path} = {value!r}" for path, value in values.items() if value]


def dispatch_names() -> tuple[str, ...]:
    """Returns the names of dispatches that a request may have."""
    return tuple(_DISPATCHES)
