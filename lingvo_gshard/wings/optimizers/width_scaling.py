"""Width scaling (muP): the learning rate of a narrow model is right for a wide one.

Source: Yang et al. 2022, Tensor Programs V, arXiv 2203.03466. The rule of a weight depends on the
sides that are wider than in a base model. The inputs are i times as wide, and the outputs o times:

    weight                                      initial deviation    learning rate
    hidden matrix: both sides grew              1 / sqrt(i)          1 / i
    output matrix: only the inputs grew         1 / i                1 / i
    input matrix: only the outputs grew         1                    1
    biases, scales, tables of positions         1                    1
    embeddings, multiplied by sqrt(M)           1 / sqrt(o)          1 / sqrt(o)

The first four rows are table 3 of the paper for Adam: variances 1 / fan_in and 1 / fan_in^2, rates
1 / fan_in. The last row is the third one by lemma J.1: a factor of what a weight is multiplied with
may move to its deviation and its rate. A router is an output matrix, since experts do not grow.

The rules change how a model starts and learns, not what it computes. Two multipliers of the paper
are therefore Params of the model, and are checked: the scale of logits if the softmax is tied to
the embeddings (table 8), and 1 / D in place of 1 / sqrt(D) in attention (definition 4.1).
"""

from __future__ import annotations

import collections
import dataclasses
import math

from lingvo_gshard.core import (
    MATRIX,
    TABLE,
    Layer,
    NestedMap,
    Params,
    UserError,
    VariableSpec,
    letters,
    names,
)
from lingvo_gshard.layers import Attention, TokenEmbedding
from lingvo_gshard.tasks import TASK_FEATURES, Task, TaskFeature
from lingvo_gshard.training import STEP_PARTS, Adafactor, Adam, Ingredients, StepPart
from lingvo_gshard.wings.optimizers.lion import Lion

_NAME = "width_scaling"
_PARAM = f"task.{_NAME}.base_widths"
# Dimensions that stay finite: the vocabulary, the longest text, experts.
_FINITE = "VLE"
# The layers of the package call initializers.fan_in with these gains.
_GAINS = (0.5, 1.0, 2.0)


@TASK_FEATURES.register(_NAME)
class WidthScaling(TaskFeature):
    """The widths of the model whose learning rate was found."""

    HELP = "Initial values and learning rates for a model that is wider than another one (muP)."

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "base_widths",
            {},
            "Letter -> its size in the base model, such as {'M': 128, 'H': 512, 'N': 4, 'D': 32}; "
            "a tuple if the letter has several sizes here, one for each from the smallest on. "
            "Empty: no width scaling.",
        )
        return p

    @property
    def is_active(self) -> bool:
        """Whether base widths are given."""
        return bool(self.p.base_widths)

    def switch_off(self, params: Params) -> None:
        """Removes the base widths from these Params."""
        params.base_widths = {}

    def declared(self, task: Task, specs: NestedMap) -> NestedMap:
        """Returns the declarations with the initial deviations and rates of the widths.

        Raises:
          UserError: base widths or multipliers do not fit the model.
        """
        if "lora" in task.features:
            raise UserError(
                f"{_PARAM} is set, and task.lora.rank is {task.p.lora.rank}: adapters have no base "
                f"model. Set {_PARAM} = {{}}, which does not change what the model computes"
            )
        widths = _Widths(self._growth(specs))
        layers = {layer.path: layer for layer in task.all_layers()}
        for layer in layers.values():
            _check_multiplier(task, layer, widths)

        def scaled(spec: VariableSpec) -> VariableSpec:
            if spec.role not in (MATRIX, TABLE):
                return spec
            return widths.scaled(spec, layers.get(spec.path.rpartition(".")[0]))

        return specs.transform(scaled)

    def _growth(self, specs: NestedMap) -> dict[tuple[str, int], float]:
        """Returns (letter, size) -> the size over the size of this letter in the base model."""
        sizes: dict[str, set[int]] = collections.defaultdict(set)
        missing: dict[str, str] = {}
        for spec in specs.flatten():
            if spec.role in (MATRIX, TABLE):
                for letter, size in _sizes(spec).items():
                    sizes[letter].add(size)
                summed = set(_sides(spec)[0]) - {*_FINITE, *self.p.base_widths}
                missing |= {letter: spec.path for letter in summed}
        found = {}
        for letter, base in self.p.base_widths.items():
            known = [each for each in sizes if each not in _FINITE]
            if letter not in known:
                hint = names.nearest(letter, known)
                raise UserError(f"{_PARAM}: {letter!r} is no width of the model. {hint}")
            here, given = sorted(sizes[letter]), base if isinstance(base, tuple) else (base,)
            if len(given) != len(here) or not all(isinstance(b, int) and b > 0 for b in given):
                raise UserError(
                    f"{_PARAM}[{letter!r}] is {base!r}, and the model has the sizes {here}; "
                    f"expected {len(here)} whole number(s) above 0, in this order"
                )
            found |= {(letter, size): size / b for size, b in zip(here, given, strict=True)}
        for letter, path in sorted(missing.items()):
            raise UserError(
                f"{_PARAM} lacks {letter!r}, over which products with {path} sum; give its size in "
                f"the base model, one of {sorted(sizes[letter])} if it is the same there"
            )
        return found


@dataclasses.dataclass(frozen=True)
class _Widths:
    """Compares the sizes of a model with the base model.

    Attributes:
      growth: (letter, size) -> how many times wider it is than in the base model.
    """

    growth: dict[tuple[str, int], float]

    def of_letters(self, spec: VariableSpec, chosen: str) -> float:
        """Returns how many times wider a side of a weight is than in the base model."""
        sizes = _sizes(spec)
        return math.prod(self.growth.get((letter, sizes[letter]), 1.0) for letter in chosen)

    def scaled(self, spec: VariableSpec, layer: Layer | None) -> VariableSpec:
        """Returns a declaration with the deviation and the rate of the table."""
        sizes, sides, start = _sizes(spec), _sides(spec), spec.initializer
        size_in, size_out = (math.prod(sizes[letter] for letter in side) for side in sides)
        grown_in, grown_out = (self.of_letters(spec, side) for side in sides)
        if spec.role == TABLE:
            wanted = rate = _embedding_factor(layer, grown_in)
        else:
            wanted = 1.0 / grown_in if grown_out == 1.0 else grown_in**-0.5
            rate = 1.0 / grown_in
        is_fan_in = any(math.isclose(start.scale**2 * size_in, gain) for gain in _GAINS)
        if start.kind == "constant" or (spec.role == TABLE and not is_fan_in):
            own = wanted
        elif is_fan_in:
            own = grown_in**-0.5
        elif math.isclose(start.scale**2 * (size_in + size_out), 6.0):
            own = ((size_in / grown_in + size_out / grown_out) / (size_in + size_out)) ** 0.5
        else:
            raise UserError(
                f"{_PARAM}: {spec.path} starts from {start.kind} numbers of scale {start.scale:g}, "
                "which is neither initializers.fan_in nor glorot_uniform of its sizes"
            )
        scale = start.scale if own == wanted else start.scale * wanted / own
        start = dataclasses.replace(start, scale=scale)
        return dataclasses.replace(spec, initializer=start, learning_rate_factor=rate)


def _sizes(spec: VariableSpec) -> dict[str, int]:
    """Returns the sizes of a weight's letters, without those that count weights."""
    sizes = dict(zip(spec.layout, spec.shape, strict=True))
    return {letter: sizes[letter] for letter in spec.layout.lstrip(letters.WEIGHT_BATCH)}


def _sides(spec: VariableSpec) -> tuple[str, str]:
    """Returns the letters of inputs and outputs; of a table, what an initializer takes for them."""
    own = "".join(_sizes(spec))
    if spec.role == TABLE:
        return "".join(letter for letter in own if letter not in _FINITE), ""
    inputs = spec.inputs or own[:1]
    return inputs, "".join(letter for letter in own if letter not in inputs)


def _embedding_factor(layer: Layer | None, grown: float) -> float:
    """Returns the factor of a table's deviation and rate. Tables of positions have none."""
    return grown**-0.5 if isinstance(layer, TokenEmbedding) and not layer.p.scale else 1.0


def _check_multiplier(task: Task, layer: Layer, widths: _Widths) -> None:
    """Raises UserError if the Params of a model lack a multiplier that a layer needs."""
    if isinstance(layer, TokenEmbedding) and layer.p.is_softmax_weight:
        grown = widths.of_letters(layer.variables["table"], "M")
        given = task.p.logit_scale if "logit_scale" in task.p else 1.0
        expected = 1.0 / (grown * _embedding_factor(layer, grown))
        if grown != 1.0 and not math.isclose(given, expected, rel_tol=1e-3):
            raise UserError(
                f"task.logit_scale is {given:g}; {expected:.6g} expected with {_PARAM}, since the "
                f"softmax is tied to {layer.path} and M is {grown:g} times as wide"
            )
    query = layer.variables.get("w_query")
    if isinstance(layer, Attention) and query and "D" in query.layout and not layer.p.query_scale:
        grown = widths.of_letters(query, "D")
        if grown != 1.0:
            raise UserError(
                f"{layer.path}: D is {grown:g} times as wide as in {_PARAM}, and query_scale is 0 "
                f"for 1 / sqrt(D); set {layer.query_scale / grown**0.5:.6g}, which falls as 1 / D, "
                "or let num_heads grow in place of D"
            )


@STEP_PARTS.register("width scaling")
class KnownOptimizers(StepPart):
    """Refuses optimizers whose updates the rules of width scaling are not for."""

    @classmethod
    def of(cls, made: Ingredients) -> None:
        optimizer = made.optimizer
        is_relative = isinstance(optimizer, Adafactor) and optimizer.p.relative_update
        is_known = isinstance(optimizer, (Adam, Lion, Adafactor)) and not is_relative
        if _NAME in made.task.features and not is_known:
            options = " with relative_update = True" if is_relative else ""
            raise UserError(
                f"step.optimizer is {type(optimizer).__name__}{options}, but {_PARAM} has rules "
                "for updates whose elements do not depend on the gradient's size: those of Adam, "
                "Lion, and Adafactor with relative_update = False"
            )
