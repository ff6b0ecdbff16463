"""Family: what is particular to the models of one architecture, and keys that many of them have."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from lingvo_gshard.core import Params, UserError, names, objects, random_numbers
from lingvo_gshard.layers import Sequential, TransformerStack
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.table import Table, TensorPattern
from lingvo_gshard.wings.preparation.published_inputs import PublishedTextInput

# Most positions of a row unless the user asks for another number.
USUAL_LENGTH = 1024
# The `copies` of families without others.
_COPIES = {"lm_head.weight": ("model.embed_tokens.weight",)}


def text_input(length: int) -> Params:
    """Returns the input of a language model."""
    return PublishedTextInput.params().set(length=length, batch_rows=8)


def given_positions(config: PublishedConfig) -> tuple[int, bool]:
    """Returns `max_position_embeddings`, which no scaling of rotary positions changes."""
    return config.get("max_position_embeddings"), False


def rotary_positions(config: PublishedConfig) -> tuple[int, bool]:
    """Returns `max_position_embeddings`, or what the scaling of rotary positions makes of them."""
    positions, rope = config.get("max_position_embeddings"), config.rope()
    kind, factor = rope.get("rope_type"), rope.get("factor") or 1.0
    if kind == "dynamic":
        # The number is that before the scaling.
        return random_numbers.floor(positions * factor), False
    if kind == "yarn":
        # Users add the scaling to a config whose number stays that before it.
        original = original_length(config, rope)
        return max(positions, random_numbers.floor(original * factor)), False
    return positions, False


def original_length(config: PublishedConfig, rope: Mapping[str, Any]) -> int:
    """Returns the positions of the texts that a model was trained on before its scaling.

    Args:
      config: the config. A key of its own precedes the rotary parameter, as in transformers.
      rope: the rotary parameters.
    """
    name = "original_max_position_embeddings"
    own = config.get(name, None, int, 1)
    return own or rope.get(name) or config.get("max_position_embeddings")


@dataclasses.dataclass(frozen=True)
class Family:
    """The models of one architecture.

    Attributes:
      model_type: the name of the architecture in `config.json`.
      read_task: returns the Params of the task that a config describes; raises UserError if the
        config asks for something that is not supported.
      config_of: returns the values of a `config.json` for the Params of a task. `config.json` does
        not describe every task in full, so callers make the task of these values and compare.
      read_left_out: returns the beginnings of the names of further tensors that are not imported;
        see `Keys.left_out`.
      input_of: returns the Params of the input, given the positions of a row.
      read_positions: returns the positions that the model was made for, and whether texts may have
        more.
      limit: the keys of a config that limit these positions, for messages.
      exported: returns the values of `config.json` that an export writes, given those that were
        imported.
    """

    model_type: str
    read_task: Callable[[PublishedConfig], Params]
    config_of: Callable[[Params], dict[str, Any]]
    read_left_out: Callable[[PublishedConfig], tuple[str, ...]] = lambda config: ()
    input_of: Callable[[int], Params] = text_input
    read_positions: Callable[[PublishedConfig], tuple[int, bool]] = rotary_positions
    limit: str = "max_position_embeddings"
    exported: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda values: values

    @property
    def keys(self) -> Keys:
        """The keys and tensors that need no code, as keys.json says."""
        own = _all_keys()[self.model_type]
        return own if own.copies else msgspec.structs.replace(own, copies=_COPIES)

    @property
    def table(self) -> Table:
        """The weight that each published tensor goes to, as tables.json says."""
        return _all_tables()[self.model_type]

    @property
    def class_keys(self) -> Mapping[str, Any]:
        """Key of `config.json` that counts -> the value that a missing key has.

        Keys with an effect in the class of transformers count, and keys of `Keys.read`.
        """
        known = class_keys().keys[self.keys.same or self.model_type]
        return known | self.keys.read | {"model_type": self.model_type}

    def task_of(self, config: PublishedConfig) -> Params:
        """Returns the Params of the task that a config describes.

        Raises:
          UserError: the config asks for something that is not supported.
        """
        task = self.read_task(self._with_keys(config))
        config.skip(*self.keys.unread, *self.keys.read)
        config.check()
        return task

    def left_out(self, config: PublishedConfig) -> tuple[str, ...]:
        """Returns the beginnings of the names of tensors that are not imported."""
        return (*self.keys.left_out, *self.read_left_out(self._with_keys(config)))

    def positions_of(self, config: PublishedConfig) -> tuple[int, bool]:
        """Returns the positions that the model was made for, and whether texts may have more."""
        return self.read_positions(self._with_keys(config))

    def _with_keys(self, config: PublishedConfig) -> PublishedConfig:
        config.take_keys(self.class_keys, self.keys.aliases)
        return config


class Keys(msgspec.Struct, forbid_unknown_fields=True):
    """The keys and tensors of a family, or of a group of families, that need no code.

    Attributes:
      architecture: the class of transformers that runs a family.
      why: what the entries are, or why they stand here.
      groups: names of groups whose entries are added to these.
      aliases: another name of a key -> the key, as in the class's `attribute_map`.
      same: the `model_type` of the class of transformers that computes a family without a class.
      unread: keys whose effect depends on other keys, which may take it away.
      read: key that counts though the class ignores it -> the value that a missing key has.
      left_out: the beginnings of the names of tensors that are not imported.
      renamed: part of the names of tensors that transformers writes -> part of the published names.
      copies: name of a tensor that may be a copy of a shared table -> names that this table may
        have. The first of these names that the model needs is the table.
    """

    architecture: str = ""
    why: str = ""
    groups: tuple[str, ...] = ()
    aliases: dict[str, str] = {}
    same: str = ""
    unread: tuple[str, ...] = ()
    read: dict[str, Any] = {}
    left_out: tuple[str, ...] = ()
    renamed: dict[str, str] = {}
    copies: dict[str, tuple[str, ...]] = {}

    def whole(self, groups: Mapping[str, Keys]) -> Keys:
        """Returns the entries of a family, joined with the entries of its groups."""
        whole = self
        for part in (groups[name].whole(groups) for name in self.groups):
            whole = Keys(
                whole.architecture,
                aliases=part.aliases | whole.aliases,
                same=whole.same,
                unread=part.unread + whole.unread,
                read=part.read | whole.read,
                left_out=part.left_out + whole.left_out,
                renamed=part.renamed | whole.renamed,
                copies=part.copies | whole.copies,
            )
        return whole


@functools.cache
def _all_keys() -> dict[str, Keys]:
    """Returns the `keys` of each family, by its `model_type`."""
    found = objects.table_beside(__file__, "keys.json", dict[str, dict[str, Keys]])
    return {name: own.whole(found["groups"]) for name, own in found["families"].items()}


class _Tables(msgspec.Struct):
    """The content of tables.json.

    Attributes:
      groups: name -> rows that families have in common, or names of other groups.
      families: `model_type` -> rows, and names of groups.
    """

    groups: dict[str, list[str | TensorPattern]]
    families: dict[str, list[str | TensorPattern]]

    def rows(self, entries: Iterable[str | TensorPattern]) -> Iterator[TensorPattern]:
        """Yields the rows of a list of rows and names of groups."""
        for entry in entries:
            if isinstance(entry, str):
                yield from self.rows(self.groups[entry])
            else:
                yield entry


@functools.cache
def _all_tables() -> dict[str, Table]:
    """Returns the table of each family, by its `model_type`."""
    found = objects.table_beside(__file__, "tables.json", _Tables)
    return {name: tuple(found.rows(entries)) for name, entries in found.families.items()}


class ClassKeys(msgspec.Struct):
    """The content of class_keys.json, which `python -m docs.class_keys` writes.

    Attributes:
      transformers: the version of the library.
      keys: `model_type` -> key with an effect -> the value of a missing key.
    """

    transformers: str
    keys: dict[str, dict[str, Any]]


@functools.cache
def class_keys() -> ClassKeys:
    """Returns the keys that have an effect in classes of transformers."""
    return objects.table_beside(__file__, "class_keys.json", ClassKeys)


def extra_layers(config: PublishedConfig) -> tuple[str, ...]:
    """Returns the beginnings of the tensors of layers that predict further tokens.

    They stand after the model's own layers. No program needs them to generate.
    """
    first, count = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers", 0)
    return tuple(f"model.layers.{first + index}." for index in range(count))


SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
INDEXED = "indexed_attention"
# Earlier name of a type of layers -> its name, for all classes.
_KINDS = {"mamba": LINEAR, "attention": FULL, "deepseek_sparse_attention": INDEXED}


def layer_types(config: PublishedConfig, period: int) -> list[str]:
    """Returns the type of each layer's attention.

    Args:
      period: number of layers of a period, if the config has no `layer_types`. The last layer of a
        period has full attention, the other layers have a sliding window.

    Raises:
      UserError: `layer_types` has the wrong length.
    """
    layers = config.get("num_hidden_layers")
    usual = [FULL if (index + 1) % period == 0 else SLIDING for index in range(layers)]
    return types_of_layers(config, usual)


def types_of_layers(
    config: PublishedConfig, usual: list[Any], key: str = "layer_types", may_be_longer: bool = False
) -> list[Any]:
    """Returns the value that a key has for each layer.

    Args:
      usual: the values of all layers if the config lacks the key.
      key: the key.
      may_be_longer: whether transformers reads as many values as there are layers.

    Raises:
      UserError: its list has the wrong length.
    """
    layers = len(usual)
    found = [_KINDS.get(str(kind), kind) for kind in config.get(key, usual, list)]
    if may_be_longer:
        found = found[:layers]
    if len(found) != layers:
        raise UserError(f"{config.where}: {key} has {len(found)} entries for {layers} layers")
    return found


def later_windows(config: PublishedConfig) -> list[str]:
    """Returns the type of each layer's attention: windows after the first `max_window_layers`."""
    layers = config.get("num_hidden_layers")
    first = config.get("max_window_layers", layers, least=0)
    has_window = config.get("sliding_window", None, int) is not None
    usual = [SLIDING if has_window and index >= first else FULL for index in range(layers)]
    return types_of_layers(config, usual)


def sliding_window(config: PublishedConfig) -> int:
    """Returns the largest distance within the sliding window; 0 if there is no window.

    A published window counts the position itself.

    Raises:
      UserError: the window has no position but the query's own, or none at all.
    """
    return config.get("sliding_window", 1, least=2) - 1


def stack_of(cls: type[TransformerStack], plain: Params) -> Params:
    """Returns the Params of a stack of another class, with all values of a plain stack."""
    stack = cls.params()
    for new, old in ((stack.layer, plain.layer), (stack, plain)):
        new.set(**{name: value for name, value in old.items() if name != "layer"})
    return stack


def above_zero(config: PublishedConfig, name: str, null: float) -> float:
    """Returns a number, or `null` if the key is null; UserError unless it is above 0."""
    found = config.get(name, null, float)
    if found <= 0 and config.is_given(name):
        raise UserError(f"{config.where}: {name} is {found}; a number above 0 was expected")
    return float(found)


def pattern_of(decoder: Params) -> tuple[Params, ...]:
    """Returns the Params of the self-attentions of consecutive layers, of one period."""
    return decoder.attention_pattern or (decoder.layer.self_attention,)


def rotating(decoder: Params) -> Params:
    """Returns the Params of the first self-attention that rotates, or that could."""
    pattern = pattern_of(decoder)
    attentions = [each for each in pattern if "rotary_fraction" in each]
    turns = (each for each in attentions if each.rotary_fraction)
    return next(turns, (attentions or pattern)[0])


def attentions_by_type(config: PublishedConfig, attention: Params) -> dict[str, Params]:
    """Returns type -> Params of the self-attention: one with the window, and one without."""
    window = sliding_window(config)
    attentions = {FULL: attention.copy()}
    if window:
        attentions[SLIDING] = attention.copy().set(window=window)
    return attentions


def rotated_in_windows(config: PublishedConfig, attention: Params) -> dict[str, Params]:
    """Returns type -> Params of the self-attention, which rotates with a window alone."""
    attentions = attentions_by_type(config, attention)
    attentions[FULL].rotary_fraction = 0.0
    return attentions


def set_pattern(
    config: PublishedConfig, decoder: Params, kinds: Sequence[str], attentions: Mapping[str, Params]
) -> None:
    """Sets the attentions of a decoder's layers.

    If the layers do not divide into whole periods, the first layers run one by one, so that the
    remaining layers divide.

    Args:
      config: the config, for messages.
      decoder: Params of the stack.
      kinds: the type of each layer.
      attentions: type -> Params of the self-attention.

    Raises:
      UserError: a type is unknown.
    """
    for kind in kinds:
        if kind == SLIDING and kind not in attentions:
            raise UserError(f"{config.where}: layer_types has {SLIDING!r}, but there is no window")
        names.check(kind, attentions, f"{config.where}: the layer type {kind!r} is unknown")
    count = len(kinds)
    period = next(n for n in range(1, count + 1) if list(kinds[n:]) == list(kinds[: count - n]))
    if period > 1:
        decoder.attention_pattern = tuple(attentions[kind].copy() for kind in kinds[:period])
        decoder.sequential_first = count % period if period < count else 0
    else:
        decoder.layer.self_attention = attentions[kinds[0]].copy()


def run_in_periods(decoder: Params, least: int = 0) -> None:
    """Has a stack run its last layers in whole periods, and the layers before them one by one.

    Args:
      decoder: Params of the stack, whose layers differ in their attentions or in their experts.
      least: number of layers that run one by one, or more.
    """
    period = math.lcm(max(decoder.moe_every, 1), len(pattern_of(decoder)))
    first = max(decoder.dense_first, least)
    first += (decoder.num_layers - first) % period
    if first < decoder.num_layers:
        decoder.sequential_first = first
    else:
        decoder.set(sequential_first=0, execution=Sequential.params())


def attention_of_layers(decoder: Params) -> list[Params]:
    """Returns the Params of each layer's self-attention."""
    pattern = pattern_of(decoder)
    return [pattern[index % len(pattern)] for index in range(decoder.num_layers)]


def windows_config(decoder: Params) -> dict[str, Any]:
    """Returns `sliding_window` and `layer_types` from the Params of a stack."""
    windows = [attention.window for attention in attention_of_layers(decoder)]
    return {
        "sliding_window": max(windows) + 1 if max(windows) else None,
        "layer_types": [SLIDING if window else FULL for window in windows],
    }


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a model that some keys of a config describe, both ways.

    Attributes:
      read: sets the hyperparameters of a task that the keys of a config stand for.
      values: returns the keys and their values, from the Params of a task.
    """

    read: Callable[[PublishedConfig, Params], Any]
    values: Callable[[Params], dict[str, Any]] = lambda task: {}


def setting(key: str, *paths: str, null: Any = None, kind: type | None = None) -> Part:
    """Returns the part of a key whose value is a hyperparameter as it is.

    Args:
      *paths: paths of the hyperparameters within the task. `attention` stands for the
        self-attention of the decoder's layers, which all have one when the key is read.
      null: the value that null stands for. None: the key must have a value.
      kind: type of a value that is no whole number above 0, if the key must have one.
    """

    def read(config: PublishedConfig, task: Params) -> None:
        value = config.get(key, kind=kind) if null is None else config.get(key, null)
        try:
            for path in paths:
                _set(task, path, value)
        except UserError as error:
            raise UserError(f"{config.where}: {key} is {value!r}. {error}") from None

    def values(task: Params) -> dict[str, Any]:
        root, _, name = paths[0].rpartition(".")
        is_attention = root == "attention"
        return {key: rotating(task.decoder).get(name) if is_attention else task.get(paths[0])}

    return Part(read, values)


def activation(*names: str) -> Part:
    """Returns the part that refuses a `hidden_act` of another name; exports have the first."""
    return Part(
        lambda config, task: config.expect("hidden_act", *names),
        lambda task: {"hidden_act": names[0]},
    )


def always(values: Mapping[str, Any]) -> Part:
    """Returns the part of hyperparameters that no key decides.

    Args:
      values: path, as in `setting` -> value.
    """

    def read(config: PublishedConfig, task: Params) -> None:
        del config
        for path, value in values.items():
            _set(task, path, value)

    return Part(read)


def _set(task: Params, path: str, value: Any) -> None:
    task.set_path(path.replace("attention.", "decoder.layer.self_attention."), value)


def layered(
    kinds: Callable[[PublishedConfig], Sequence[str]],
    attentions: Callable[[PublishedConfig, Params], Mapping[str, Params]] = attentions_by_type,
    values: Callable[[Params], dict[str, Any]] = lambda task: windows_config(task.decoder),
) -> Part:
    """Returns the part of layers whose self-attentions differ.

    Args:
      kinds: returns the type of each layer's attention.
      attentions: returns type -> Params, given the Params that all have in common.
      values: as in `Part`.
    """

    def read(config: PublishedConfig, task: Params) -> None:
        common = task.decoder.layer.self_attention
        set_pattern(config, task.decoder, kinds(config), attentions(config, common))

    return Part(read, values)


def _read_window(config: PublishedConfig, task: Params) -> None:
    task.decoder.layer.self_attention.window = sliding_window(config)


# Keys of many families.
BIASES = setting("attention_bias", "attention.use_bias", "attention.use_output_bias", null=False)
INPUT_BIASES = setting("attention_bias", "attention.use_bias", null=False)
FEED_FORWARD_BIAS = setting("mlp_bias", "decoder.layer.feed_forward.use_bias", null=False)
JITTER = setting("router_jitter_noise", "decoder.moe.router.jitter", null=0.0)
SILU = activation("silu", "swish")
# Layers differ in their attentions or in their experts.
IN_PERIODS = Part(lambda config, task: run_in_periods(task.decoder))
# One sliding window in all layers.
WINDOW = Part(
    _read_window, lambda task: {"sliding_window": windows_config(task.decoder)["sliding_window"]}
)
