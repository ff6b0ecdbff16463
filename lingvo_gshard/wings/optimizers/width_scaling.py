"""Width scaling (muP): the learning rate of a narrow model is right for a wide one.

Source: Yang et al. 2022, Tensor Programs V, arXiv 2203.03466. A weight is judged by which of its
sides are wider than in a base model. With i and o, the factors by which inputs and outputs grew:

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
are therefore Params of the model, and are checked: that of a softmax tied to the embeddings (table
8), and 1 / D in place of 1 / sqrt(D) in attention (definition 4.1).
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping

from lingvo_gshard.core import MATRIX, NestedMap, Params, UserError, VariableSpec, letters, names
from lingvo_gshard.core.layer import TABLE
from lingvo_gshard.layers import Attention, TokenEmbedding
from lingvo_gshard.tasks import TASK_FEATURES, Task, TaskFeature
from lingvo_gshard.training import STEP_PARTS, Adam, Ingredients, StepPart
from lingvo_gshard.training.step.adafactor import Adafactor
from lingvo_gshard.wings.optimizers.lion import Lion

_NAME = "width_scaling"
_PARAM = f"task.{_NAME}.base_widths"
# Dimensions that stay finite: the vocabulary, the longest text, experts.
_FINITE = "VLE"
# Gains of the fan-in initializers of the package's layers.
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
        """Sets Params of these to have no base widths."""
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
        widths = _Widths.of(self.p.base_widths, specs)
        layers = {layer.path: layer for layer in task.all_layers()}
        for path, layer in layers.items():
            if isinstance(layer, Attention):
                _check_attention(path, layer, widths)
        embeddings = {p: each for p, each in layers.items() if isinstance(each, TokenEmbedding)}
        _check_tied_softmax(task, embeddings, widths)

        def scaled(spec: VariableSpec) -> VariableSpec:
            if spec.role == TABLE:
                return widths.scaled_table(spec, embeddings.get(spec.path.rpartition(".")[0]))
            return widths.scaled_matrix(spec) if spec.role == MATRIX else spec

        return specs.transform(scaled)


@dataclasses.dataclass(frozen=True)
class _Widths:
    """How many times wider each dimension is than in the base model.

    Attributes:
      growth: (letter, size in this model) -> the factor.
    """

    growth: Mapping[tuple[str, int], float]

    @classmethod
    def of(cls, base_widths: Mapping[str, object], specs: NestedMap) -> _Widths:
        """Returns the factors of a model's weights.

        Raises:
          UserError: a letter or a size is missing or wrong.
        """
        sizes: dict[str, set[int]] = collections.defaultdict(set)
        summed: dict[str, str] = {}
        for spec in specs.flatten():
            if spec.role in (MATRIX, TABLE):
                for letter, size in _own(spec).items():
                    sizes[letter].add(size)
            if spec.role == MATRIX:
                summed.update(dict.fromkeys(set(_inputs(spec)) - {*_FINITE}, spec.path))
        for letter in base_widths:
            if letter not in sizes or letter in _FINITE:
                widths = [each for each in sizes if each not in _FINITE]
                hint = names.nearest(letter, widths)
                raise UserError(f"{_PARAM}: {letter!r} is no width of the model. {hint}")
        for letter, path in sorted(summed.items()):
            if letter not in base_widths:
                raise UserError(
                    f"{_PARAM} lacks {letter!r}, over which products with {path} sum; give its "
                    f"size in the base model, {_listed(sizes[letter])} if it is the same there"
                )
        found = {}
        for letter, base in base_widths.items():
            given = base if isinstance(base, tuple) else (base,)
            here = sorted(sizes[letter])
            if len(given) != len(here) or not all(isinstance(b, int) and b > 0 for b in given):
                raise UserError(
                    f"{_PARAM}[{letter!r}] is {base!r}, and the model has the sizes "
                    f"{_listed(here)}; expected {len(here)} whole number(s) above 0, in this order"
                )
            found |= {(letter, size): size / b for size, b in zip(here, given, strict=True)}
        return cls(found)

    def of_letters(self, spec: VariableSpec, chosen: str) -> float:
        """Returns the factor by which a side of a weight grew."""
        own = _own(spec)
        return math.prod(self.growth.get((letter, own[letter]), 1.0) for letter in chosen)

    def scaled_matrix(self, spec: VariableSpec) -> VariableSpec:
        """Returns the declaration of a matrix by table 3."""
        inputs = _inputs(spec)
        outputs = "".join(letter for letter in _own(spec) if letter not in inputs)
        grown_in, grown_out = self.of_letters(spec, inputs), self.of_letters(spec, outputs)
        deviation = 1.0 / grown_in if grown_out == 1.0 else grown_in**-0.5
        return self._scaled(spec, inputs, outputs, deviation, 1.0 / grown_in)

    def scaled_table(self, spec: VariableSpec, embedding: TokenEmbedding | None) -> VariableSpec:
        """Returns the declaration of a table; `embedding` is the layer of a table of tokens."""
        outputs = "".join(letter for letter in _own(spec) if letter not in _FINITE)
        factor = _table_factor(embedding, self.of_letters(spec, outputs))
        return self._scaled(spec, outputs, "", factor, factor)

    def _scaled(
        self, spec: VariableSpec, inputs: str, outputs: str, deviation: float, rate: float
    ) -> VariableSpec:
        """Returns a declaration with a learning rate, and a deviation in place of its own.

        Args:
          inputs: the letters whose size the initializer knows as fan_in.
          deviation: the initial deviation, as a factor of that of the base model.
        """
        own, start = _own(spec), spec.initializer
        size_in, size_out = (math.prod(own[x] for x in side) for side in (inputs, outputs))
        grown_in, grown_out = self.of_letters(spec, inputs), self.of_letters(spec, outputs)
        is_fan_in = any(math.isclose(start.scale**2 * size_in, gain) for gain in _GAINS)
        if start.kind == "constant" or (spec.role == TABLE and not is_fan_in):
            grown = deviation
        elif is_fan_in:
            grown = grown_in**-0.5
        elif math.isclose(start.scale**2 * (size_in + size_out), 6.0):
            grown = ((size_in / grown_in + size_out / grown_out) / (size_in + size_out)) ** 0.5
        else:
            raise UserError(
                f"{_PARAM}: {spec.path} starts from {start.kind} numbers of scale {start.scale:g}, "
                "which is neither initializers.fan_in nor glorot_uniform of its sizes; width "
                "scaling knows no rule for it"
            )
        scale = start.scale if grown == deviation else start.scale * deviation / grown
        initializer = dataclasses.replace(start, scale=scale)
        return dataclasses.replace(spec, initializer=initializer, learning_rate_factor=rate)


def _own(spec: VariableSpec) -> dict[str, int]:
    """Returns the sizes of a weight's letters, without those that count weights."""
    sizes = dict(zip(spec.layout, spec.shape, strict=True))
    return {letter: sizes[letter] for letter in spec.layout.lstrip(letters.WEIGHT_BATCH)}


def _inputs(spec: VariableSpec) -> str:
    """Returns the letters that products with a matrix sum over; by default its first one."""
    return spec.inputs or spec.layout.lstrip(letters.WEIGHT_BATCH)[:1]


def _listed(sizes: set[int] | list[int]) -> str:
    return ", ".join(map(str, sorted(sizes)))


def _table_factor(embedding: TokenEmbedding | None, grown: float) -> float:
    """Returns the factor of a table's deviation and rate.

    Embeddings are multiplied by sqrt(M), unless the Params of the model say by which number.
    """
    return grown**-0.5 if embedding and not embedding.p.scale else 1.0


def _check_tied_softmax(
    task: Task, embeddings: Mapping[str, TokenEmbedding], widths: _Widths
) -> None:
    """Raises UserError if logits are not scaled as a table that is softmax, too, needs it."""
    for path, embedding in embeddings.items():
        spec = embedding.variable_specs().table
        grown = widths.of_letters(spec, "M")
        expected = 1.0 / (grown * _table_factor(embedding, grown))
        if not embedding.p.is_softmax_weight or grown == 1.0:
            continue
        given = task.p.logit_scale if "logit_scale" in task.p else 1.0
        if not math.isclose(given, expected, rel_tol=1e-3):
            raise UserError(
                f"task.logit_scale is {given:g}; {expected:.6g} expected with "
                f"{_PARAM}, since the softmax is tied to {path} and M is {grown:g} times as wide"
            )


def _check_attention(path: str, layer: Attention, widths: _Widths) -> None:
    """Raises UserError if heads grew and queries are scaled by the default, 1 / sqrt(D)."""
    query = layer.variables.get("w_query")
    grown = widths.of_letters(query, "D") if query and "D" in query.layout else 1.0
    if grown != 1.0 and not layer.p.query_scale:
        raise UserError(
            f"{path}: D is {grown:g} times as wide as in {_PARAM}, and query_scale is 0 for "
            f"1 / sqrt(D); set {layer.query_scale / grown**0.5:.6g}, which falls as 1 / D, or let "
            "num_heads grow in place of D"
        )


@STEP_PARTS.register("width scaling")
class KnownOptimizers(StepPart):
    """Refuses optimizers that the rules of width scaling are not for."""

    @classmethod
    def of(cls, made: Ingredients) -> None:
        """Returns None: the weights' declarations say all that a step needs.

        Raises:
          UserError: the updates of the optimizer grow with the widths in another way than Adam's.
        """
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
