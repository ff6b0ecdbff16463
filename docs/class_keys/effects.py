"""Models of one class of transformers, and what the keys of their configs change."""

from __future__ import annotations

import ast
import contextlib
import copy
import dataclasses
import importlib
import inspect
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import transformers

from benchmarks.parity.case import Case
from benchmarks.parity.variant_process import Outcome, compute

# Adds the router's loss to the loss of training. Here it is always added.
_WITH_ROUTER_LOSS = "output_router_logits"
# Names that say how a model is run or stored, or that another part of a run reads.
_NOT_OF_A_MODEL = {
    "architectures",
    "dtype",
    "id2label",
    "label2id",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "quantization_config",
    "return_dict",
    "rope_parameters",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "use_return_dict",
}
_VALUES = (
    *(
        True,
        None,
        2,
        0,
        0.5,
        "gelu",
        "relu",
        "greedy",
        "group_limited_greedy",
        [0],
        [],
        [1, 0, 1, 0],
    ),
    *({"0": [1]}, {"0": {"sliding_window": 3}}),
)
# Keys that decide what others would, and sizes at which the texts of the cases meet their bounds.
_BY_LAYER = ("layer_types", "mlp_layer_types", "moe_layers", "no_rope_layers", "rope_parameters")
_NEAR = {
    "sliding_window": 6,
    "max_window_layers": 1,
    "attention_chunk_size": 5,
    "index_topk": 3,
    "floor_scale": 4,
}
# Keys of all classes with rotary positions, and where scalings find lengths.
_ROTARY = ("original_max_position_embeddings", "rope_parameters")
# They say which side of a translation model a stack is.
_SIDES = ("is_decoder", "is_encoder_decoder")
_TYPES = {
    "mlp_layer_types": (("dense", "sparse"), ("hash_moe", "moe")),
    # The first layer has no earlier one.
    "indexer_types": (("full", "shared"),),
}
_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")


def _stated(value: Any) -> Any:
    """Returns the default of a field; None for one that must be given or is made anew."""
    return None if value is dataclasses.MISSING else value


def quietly(function: Any, *arguments: Any) -> Any:
    """Returns a function's result, or None if it raises an error of any kind."""
    with contextlib.suppress(Exception):
        return function(*arguments)
    return None


class Models:
    """The small models of one class.

    Attributes:
      universe: the keys that may have an effect.
    """

    def __init__(self, model_type: str, cases: Sequence[Case]):
        """Makes the models of some cases.

        Args:
          model_type: the class, by its name in config.json.
          cases: the models.
        """
        self._cls = transformers.CONFIG_MAPPING[model_type]
        fields = {field.name: field.default for field in dataclasses.fields(self._cls)}
        self._fields = {name: _stated(value) for name, value in fields.items()}
        self._cases, self._plain = [], []
        with _asked_keys() as asked:
            for case in (*cases, *self._derived(cases[0])):
                outcome = quietly(self._compute, case, {})
                if outcome is not None:
                    self._cases.append(case)
                    self._plain.append(outcome)
        names = (
            {"rope_scaling"}
            | asked
            | self._named()
            | set(self._fields)
            | set(self._cls.attribute_map)
        )
        self.universe = {
            name
            for name in names - _NOT_OF_A_MODEL - {_WITH_ROUTER_LOSS}
            if not name.startswith("_")
            and (
                name in (*self._fields, "rope_scaling")
                or not hasattr(transformers.PreTrainedConfig, name)
            )
        }

    def _derived(self, case: Case) -> Iterator[Case]:
        """Yields models in which keys matter that have no effect in a usual model."""
        bare = {key: value for key, value in case.config.items() if key not in _BY_LAYER}
        yield dataclasses.replace(case, config=bare)
        near = bare | {key: value for key, value in _NEAR.items() if key in self._fields}
        yield dataclasses.replace(case, config=near)
        for key, value in self._fields.items():
            if isinstance(value, bool) and key not in (*_NOT_OF_A_MODEL, *_SIDES):
                turned = dataclasses.replace(case, config={**near, key: not value})
                if quietly(self._compute, turned, {}) is not None:
                    near = dict(turned.config)
        yield dataclasses.replace(case, config=near)

    def defaults(self, names: Collection[str]) -> dict[str, Any]:
        """Returns key -> the value that a config without it has, sorted by key."""
        plain = {name: self._fields[name] for name in names if name in self._fields}
        plain["per_layer_config"] = None
        plain |= {name: self._neutral(name) for name in names if name not in self._fields}
        # It limits the texts that a model is given, whatever its class computes.
        limit = "max_position_embeddings"
        plain |= {limit: self._fields[limit]} if limit in self._fields else {}
        if "rope_parameters" in self._fields:
            plain |= {name: self._fields.get(name) for name in _ROTARY} | self._usual_rotations()
            base = self._cls.default_theta
            if isinstance(base, dict):
                plain["rope_local_base_freq"], base = base["local"], base["global"]
            if "rope_theta" in names:
                plain["rope_theta"] = base
            if any(
                isinstance(value, dict) for value in (self._cls().rope_parameters or {}).values()
            ):
                # The parameters of each type of layer name their own lengths.
                del plain["original_max_position_embeddings"]
        return dict(sorted(plain.items()))

    def _usual_rotations(self) -> dict[str, Any]:
        """Returns what a config without rotary keys has for them, but for the class's base."""
        found = dict(self._cls().rope_parameters or {})
        if found.get("rope_theta") == self._cls.default_theta:
            del found["rope_theta"]
        share = found.pop("partial_rotary_factor", None)
        usual = {} if share is None else {"partial_rotary_factor": share}
        is_scaled = found.get("rope_type", "default") != "default"
        return usual | ({"rope_parameters": found} if is_scaled else {})

    def _neutral(self, name: str) -> Any:
        """Returns the first usual value without effect of a key that the class does not state."""
        for value in (None, False, True):
            pairs = zip(self._cases, self._plain, strict=True)
            found = ((quietly(self._compute, case, {name: value}), plain) for case, plain in pairs)
            if all(outcome is not None and outcome.equals(plain) for outcome, plain in found):
                return value
        return None

    def effects(self) -> set[str]:
        """Returns the keys that have an effect."""
        found: set[str] = set()
        self._equal, self._failed = set(), set()
        for case, plain in zip(self._cases, self._plain, strict=True):
            values = {name: self._values(name, case) for name in self.universe - found}
            for index in range(max(map(len, values.values()))):
                tried = {
                    name: choices[index]
                    for name, choices in values.items()
                    if name not in found and index < len(choices)
                }
                found |= self._effective(case, plain, tried)
        # A key whose values all break the model is one that it reads.
        return found | (self._failed - self._equal) & self._fields.keys()

    def _effective(self, case: Case, plain: Outcome, changes: dict[str, Any]) -> set[str]:
        """Returns which of some changes have an effect, by halving those that have one together."""
        if not changes:
            return set()
        found = quietly(self._compute, case, changes)
        if found is not None and found.equals(plain):
            self._equal |= changes.keys()
            return set()
        if len(changes) == 1:
            self._failed |= changes.keys()
            return set(changes) if found is not None else set()
        items = sorted(changes.items())
        halves = items[: len(items) // 2], items[len(items) // 2 :]
        return set().union(*(self._effective(case, plain, dict(half)) for half in halves))

    def _values(self, name: str, case: Case) -> list[Any]:
        """Returns the values of a key that the class takes, without the one that it has."""
        layers = case.values.get("num_hidden_layers", 3)
        # Some classes refuse to name one value of a key that differs by layer.
        plain = quietly(getattr, self._config(dict(case.values)), name)
        candidates = [value for value in _VALUES if value != plain or value is True]
        if name == "layer_types":
            candidates = [[kind] * layers for kind in _KINDS]
        elif name in _TYPES:
            candidates = [
                [first] * count + [other] * (layers - count)
                for first, other in _TYPES[name]
                for count in (1, layers, 0)
            ]
        elif name == "use_bidirectional_attention" and plain is None:
            candidates = ["all"]
        elif name == "index_topk_pattern":
            candidates = ["F" + "S" * (layers - 1)]
        elif name == "rope_scaling":
            candidates = [{"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}]
        if isinstance(plain, (int, float)) and not isinstance(plain, bool):
            candidates = [2 * plain, plain / 2, plain // 2, plain + 1, 0, None]
        elif isinstance(plain, bool):
            candidates = [not plain, None]
        return [
            value
            for value in candidates
            if quietly(self._config, {**case.values, name: value}) is not None
        ]

    def _compute(self, case: Case, changes: dict[str, Any]) -> Outcome:
        return compute(self._config({**case.values, **changes}), bool(case.start))

    def _config(self, values: dict[str, Any]) -> Any:
        # The class changes nested values in place.
        return self._cls.from_dict(copy.deepcopy(values))

    def _named(self) -> set[str]:
        """Returns the keys that the source of the class names."""
        found = set()
        auto = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        auto = auto if self._cls in auto else transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
        # Some classes of configs belong to the model of another one.
        for module in (self._cls.__module__, auto[self._cls].__module__):
            source = inspect.getsource(importlib.import_module(module))
            for node in ast.walk(ast.parse(source)):
                found |= set(_key(node))
        return found


def _key(node: ast.AST) -> Iterator[str]:
    """Yields the key that an expression reads of a config."""
    if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith(("config", "self")):
        if ast.unparse(node.value) != "self":
            yield node.attr
    is_call = isinstance(node, ast.Call) and node.args
    if is_call and ast.unparse(node.func) in ("kwargs.pop", "kwargs.get", "getattr"):
        for argument in node.args[:2]:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value


@contextlib.contextmanager
def _asked_keys() -> Iterator[set[str]]:
    """Collects the names of the attributes that anyone asks configs for."""
    asked: set[str] = set()
    cls = transformers.PreTrainedConfig
    plain = cls.__getattribute__

    def record(self: Any, name: str) -> Any:
        if not name.startswith("__"):
            asked.add(name)
        return plain(self, name)

    cls.__getattribute__ = record
    try:
        yield asked
    finally:
        cls.__getattribute__ = plain
