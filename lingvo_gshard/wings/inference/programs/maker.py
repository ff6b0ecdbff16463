"""ProgramMaker: lowers the decoding functions of a model to programs.

Every program takes arrays in this order: the weights, the state, and its own. `Program.inputs` has
their paths: `weights.decoder.layers[0]...`, `state.ids_BW`, `new.source_aK`. The memory of the
state is donated, so that caches are updated in place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from lingvo_gshard.core import NestedMap, known_sizes, letters, tf
from lingvo_gshard.runtime import Array, Program, ProgramOutputs, lower
from lingvo_gshard.sharding import (
    PLATFORMS,
    Partitioning,
    Split,
    Strategy,
    annotate_weights,
    use_partitioning,
    xla,
)
from lingvo_gshard.tasks import TokenTask
from lingvo_gshard.wings.inference.decoding.models import expert_gates, token_scores
from lingvo_gshard.wings.inference.decoding.precision import TRAINED, stored_weights
from lingvo_gshard.wings.inference.decoding.state import SearchKind, StateShape, state_specs
from lingvo_gshard.wings.inference.decoding.steps import OPTION_LEAVES, Admission, Steps
from lingvo_gshard.wings.inference.model_facts import ModelFacts
from lingvo_gshard.wings.inference.programs import executables


def decoding_partitioning(partitioning: Partitioning) -> Partitioning:
    """Returns the partitioning of decoding programs.

    A step has one position for each hypothesis, so positions are not split. The axes of token
    groups split the rows instead: devices that compute different tokens in training decode
    different texts. Weights keep their layout.
    """
    overrides = tuple((pattern, _unsplit(table)) for pattern, table in partitioning.overrides)
    found = partitioning.strategy
    groups, rows = (found.activations.get(letter, ()) for letter in "GB")
    axes = groups + tuple(axis for axis in rows if axis not in groups)
    strategy = _unsplit(found, B=axes, G=axes)
    return dataclasses.replace(partitioning, strategy=strategy, overrides=overrides)


def row_parts(partitioning: Partitioning | None) -> int:
    """Returns the number of parts of a batch that a mesh decodes side by side; 1 without a mesh."""
    if partitioning is None:
        return 1
    return partitioning.parts(decoding_partitioning(partitioning).split("B")[0])


def _unsplit(strategy: Strategy, **rules: tuple[str, ...]) -> Strategy:
    """Returns a strategy with other rules for activations, and none for their positions."""
    kept = {x: axes for x, axes in strategy.activations.items() if x not in letters.POSITIONS}
    return dataclasses.replace(strategy, activations=kept | rules)


# The mesh of a model that is not sharded.
ONE_DEVICE = "data=1"

LOCAL_LETTERS = {"a": "texts that enter together", "p": "positions of given tokens"}


class ProgramMaker:
    """Lowers the decoding programs of one model under one partitioning."""

    def __init__(
        self,
        task: TokenTask,
        facts: ModelFacts,
        partitioning: Partitioning | None = None,
        partitioner: str = "gspmd",
        precision: str = TRAINED,
        platform: str = "",
    ):
        """Prepares to lower; nothing is traced yet. See `make_engine` for the arguments."""
        # Decoding multiplies by merged weights, which takes no longer than without adapters.
        self._trained, self._task = task, task.plain
        self._facts, self._partitioner = facts, partitioner
        self._precision = precision
        partitioning = partitioning or Partitioning.make(ONE_DEVICE, "replicated")
        # Kernels need manual regions, which Shardy does not have.
        self._platform = platform if partitioner == "gspmd" and platform in PLATFORMS else ""
        self._partitioning = decoding_partitioning(partitioning).on(self._platform)

    def make(self, key: executables.ProgramKey) -> Program:
        """Returns a program. It is traced and lowered now, which takes about a second."""
        if key.name == executables.PREPARE:
            return self._prepared[0]
        makers: dict[str, Callable[[executables.ProgramKey], Program]] = {
            executables.ADMIT: self._admit,
            executables.STEPS: self._steps,
            executables.GATES: self._gates,
            executables.SCORES: self._scores,
        }
        return makers[key.name](key)

    @functools.cached_property
    def _prepared(self) -> tuple[Program, NestedMap]:
        """The program that makes the decoding weights, and these as a tree of tf.TensorSpec."""
        specs = self._trained.variable_specs()
        trees = []

        def prepare(*tensors: tf.Tensor) -> ProgramOutputs:
            theta = annotate_weights(specs.pack(tensors), specs, "weights")
            merged = self._trained.merged(theta)
            weights = stored_weights(self._task, merged, self._precision)
            trees[:] = [weights.transform(lambda x: tf.TensorSpec(x.shape, x.dtype))]
            return [
                (f"weights.{path}", tf.identity(x), self._weight_split(x))
                for path, x in weights.flatten_items()
            ]

        arrays = [
            Array(
                f"theta.{path}",
                spec.shape,
                spec.dtype,
                self._partitioning.spec_storage_split(spec, "weights"),
            )
            for path, spec in specs.flatten_items()
        ]
        program = self._lower(executables.PREPARE, prepare, arrays)
        return program, trees[0]

    def _steps(self, key: executables.ProgramKey) -> Program:
        kind, shape = _search_of(key)
        steps = Steps(self._task, kind, self._facts.end_ids, self._facts.most_steps)
        weights, state = self._prepared[1], self._state(kind, shape)
        extra = [
            Array("new.is_alive_B", (shape.rows,), "int32", ((),)),
            *(Array(f"new.{name}", (), "int32", ()) for name in ("most_steps", "enough")),
        ]

        def run(*tensors: tf.Tensor) -> ProgramOutputs:
            theta, before, (is_alive_B, most_steps, enough) = _packed(tensors, weights, state)
            before.is_active_B *= is_alive_B
            after, records = steps.run(theta, before, most_steps, enough)
            for name in ("is_active_B", "generated_B"):
                records[name] = tf.identity(after[name])
            described = [(f"record.{name}", x, _whole(x.shape)) for name, x in records.items()]
            return [*self._described(after), *described]

        return self._lower_on_state(key, run, state, extra)

    def _admit(self, key: executables.ProgramKey) -> Program:
        kind, shape = _search_of(key)
        admission = Admission(self._task, kind)
        weights, state = self._prepared[1], self._state(kind, shape)
        new = self._new_specs(key, state)

        def run(*tensors: tf.Tensor) -> ProgramOutputs:
            theta, before, (text_of_row_B, *rest) = _packed(tensors, weights, state)
            return self._described(admission.run(theta, before, new.pack(rest), text_of_row_B))

        extra = [Array("new.text_of_row_B", (shape.rows,), "int32", ((),))]
        extra += [
            Array(
                f"new.{path}", tuple(known_sizes(spec.shape)), spec.dtype.name, _whole(spec.shape)
            )
            for path, spec in new.flatten_items()
        ]
        return self._lower_on_state(key, run, state, extra)

    def _new_specs(self, key: executables.ProgramKey, state: NestedMap) -> NestedMap:
        """Returns the tree of tf.TensorSpec of the texts that enter."""
        texts = key.texts
        new = NestedMap(
            last_a=tf.TensorSpec((texts,), tf.int32),
            options=NestedMap(
                {
                    name: tf.TensorSpec((texts, *state[name].shape[1:]), state[name].dtype)
                    for name in OPTION_LEAVES
                    if name in state
                }
            ),
        )
        if key.source:
            new.source_aK = tf.TensorSpec((texts, key.source), tf.int32)
        if key.given:
            new.given_ap = tf.TensorSpec((texts, key.given), tf.int32)
        return new

    def _gates(self, key: executables.ProgramKey) -> Program:
        assert key.shape is not None
        shape, (program, weights) = key.shape, self._prepared
        sizes = {"ids_BL": shape.length, "source_BK": shape.memory_length}
        texts = [
            Array(f"new.{name}", (shape.rows, size), "int32", ((), ()))
            for name, size in sizes.items()
            if size
        ]

        def run(*tensors: tf.Tensor) -> ProgramOutputs:
            count = len(tensors) - len(texts)
            found = expert_gates(self._task, weights.pack(tensors[:count]), *tensors[count:])
            return [
                (f"{number}/{path}", gates_BLE, _whole(gates_BLE.shape))
                for number, (path, gates_BLE) in enumerate(found)
            ]

        return self._lower(str(key), run, [*program.outputs, *texts])

    def _scores(self, key: executables.ProgramKey) -> Program:
        assert key.shape is not None
        shape, (program, weights) = key.shape, self._prepared
        texts = Array("new.ids_BL", (shape.rows, shape.length + 1), "int32", ((), ()))

        def run(*tensors: tf.Tensor) -> ProgramOutputs:
            found = token_scores(self._task, weights.pack(tensors[:-1]), tensors[-1])
            names = ("log_probabilities", "likeliest", "largest")
            return [(name, x, _whole(x.shape)) for name, x in zip(names, found, strict=True)]

        return self._lower(str(key), run, [*program.outputs, texts])

    def _lower_on_state(
        self,
        key: executables.ProgramKey,
        function: Callable[..., ProgramOutputs],
        state: NestedMap,
        extra: Sequence[Array],
    ) -> Program:
        program, weights = self._prepared
        arrays = [
            *program.outputs,
            *(
                Array(f"state.{path}", tuple(s.shape.as_list()), s.dtype.name, self._split(path, s))
                for path, s in state.flatten_items()
            ),
            *extra,
        ]
        first = len(weights.flatten())
        return self._lower(str(key), function, arrays, range(first, first + len(state.flatten())))

    def _lower(
        self,
        name: str,
        function: Callable[..., ProgramOutputs],
        arrays: Sequence[Array],
        donated: Sequence[int] = (),
    ) -> Program:
        with use_partitioning(self._partitioning):
            return lower(
                name.replace("-", "_"),
                function,
                arrays,
                self._partitioning,
                donated,
                self._partitioner,
            )

    def _state(self, kind: SearchKind, shape: StateShape) -> NestedMap:
        task, vocabulary_size = self._task, self._facts.vocabulary_size
        # A kernel reads the visible slots of one block.
        in_blocks = not self._platform or kind.beam > 1
        with use_partitioning(self._partitioning):
            dtype = task.activation_dtype
            return state_specs(task, kind, shape, vocabulary_size, dtype, in_blocks)

    def _described(self, state: NestedMap) -> list:
        """Returns a state as the outputs that `lower` takes: (path, tensor, split)."""
        return [(f"state.{path}", x, self._split(path, x)) for path, x in state.flatten_items()]

    def _weight_split(self, weight: tf.Tensor) -> Split:
        """Returns the split of a decoding weight, which its annotation states."""
        split = xla.annotated_split(weight, self._partitioning.mesh) or _whole(weight.shape)
        return self._partitioning.storage_split(known_sizes(weight.shape), split)

    def _split(self, path: str, array: tf.Tensor | tf.TensorSpec) -> Split:
        """Returns the split of an array of the state: by rows, keys and values by heads, too."""
        shape = known_sizes(array.shape)
        if not shape:
            return ()
        has_heads = path.startswith(("caches", "memory.layers"))
        split = self._partitioning.split("BN" if has_heads else "B")
        whole = ((),) * (len(shape) - len(split))
        return self._partitioning.storage_split(shape, (*split, *whole))


def _search_of(key: executables.ProgramKey) -> tuple[SearchKind, StateShape]:
    """Returns the kind and the sizes of a program that works on a state."""
    assert key.kind is not None and key.shape is not None
    return key.kind, key.shape


def _whole(shape: tf.TensorShape) -> Split:
    return ((),) * len(shape)


def _packed(
    tensors: Sequence[tf.Tensor], weights: NestedMap, state: NestedMap
) -> tuple[NestedMap, NestedMap, Sequence[tf.Tensor]]:
    """Returns weights, state and the other tensors of a program's arguments."""
    first, second = len(weights.flatten()), len(state.flatten())
    theta, before = weights.pack(tensors[:first]), state.pack(tensors[first : first + second])
    return theta, before, tensors[first + second :]
