"""Replayed: routers take recorded experts, and compute their gates from their own logits.

Megatron Core's router replay computes gates in the same way: it replaces the indices of the top-k
and gathers the scores there (megatron/core/transformer/moe/router_replay.py). Here the kept flags
are replayed, too: only tokens that were kept ask for slots, so all of them get one.

A choice is one number: 1 + 2 * expert + (1 if the token was kept). 0 is no choice, such as padding
of groups.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from lingvo_gshard.core import NestedMap, UserError, context, tf, unstacked
from lingvo_gshard.layers import Assignment, Choice, Router, token_context
from lingvo_gshard.sharding import annotate
from lingvo_gshard.training import TensorBatch, Trainer
from lingvo_gshard.wings.services.routers.counts import sums_of_step
from lingvo_gshard.wings.services.run_options import CHOICES

LOCAL_LETTERS = {"k": "choices of a token"}

# int32 [B,1], the number of each row of a batch, among the arrays that begin with CHOICES.
_ROWS = "rows"

Selected: TypeAlias = "list[tuple[tf.Tensor, tf.Tensor]]"
# Path of a router -> int32 [B,L,k], its choices.
Codes = Mapping[str, np.ndarray]


def code_of(expert: Any, kept: Any) -> Any:
    """Returns the numbers of choices, given int32 experts and kept flags 0 or 1 of one shape."""
    return 1 + 2 * expert + kept


def expert_of(code: Any) -> Any:
    """Returns the experts of the numbers of choices."""
    return (code - 1) // 2


def kept_of(code: Any) -> Any:
    """Returns the kept flags, 0 or 1, of the numbers of choices."""
    return code - code_of(expert_of(code), 0)


def arrays(rows: int, codes: Codes) -> dict[str, np.ndarray]:
    """Returns the arrays that a batch has beside its own, so that `replaying` finds them."""
    numbers = np.arange(rows, dtype=np.int32)[:, None]
    return {f"{CHOICES}{name}": x for name, x in {_ROWS: numbers, **codes}.items()}


def replaying(batch: TensorBatch) -> contextlib.AbstractContextManager[object]:
    """Opens a context for a pass: routers replay the choices among the arrays of a batch."""
    given = {name.removeprefix(CHOICES): x for name, x in batch.items() if name.startswith(CHOICES)}
    if not given:
        return contextlib.nullcontext()
    return token_context.override(choices=given, on_choice=Replayed())


@dataclasses.dataclass(frozen=True)
class RecordedChoices:
    """The forward pass of a step that records the choices of its routers; see `RoutingSums`."""

    trainer: Trainer
    rows: int

    def __call__(self, theta: NestedMap, batch: TensorBatch) -> dict[str, tf.Tensor]:
        """Returns name -> float32 [B,L,k] for `watched_batch` and `arrays`; see `codes_of`."""
        return sums_of_step(self.trainer, theta, batch, {"on_choice": Replayed(self.rows)})


def codes_of(sums: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns path of a router -> int32 [B,L,k], of the results of `RecordedChoices`."""
    codes: dict[str, np.ndarray] = {}
    for name, value in sums.items():
        is_loop = value.ndim == 4
        names = unstacked(name, len(value)) if is_loop else [name]
        values = value if is_loop else [value]
        codes |= {n: np.rint(x).astype(np.int32) for n, x in zip(names, values, strict=True)}
    return codes


@dataclasses.dataclass(frozen=True)
class Replayed:
    """Replays the choices in the token context, and may record what is chosen; see `OnChoice`.

    Attributes:
      rows: size of B of the batch whose choices are recorded; 0: none are.
      asked: paths of the routers that have asked for their experts in this pass.
    """

    rows: int = 0
    asked: set[str] = dataclasses.field(default_factory=set)

    def select(self, router: Router, selected: Selected) -> Selected:
        """Returns the recorded experts of each token, or those selected where there are none."""
        self.asked.add(router.path)
        code_GSk = _given(router, len(selected))
        if code_GSk is None:
            return selected
        found = []
        for code_GS, (own_GS, _) in zip(tf.unstack(code_GSk, axis=-1), selected, strict=True):
            expert_GS = tf.where(code_GS > 0, expert_of(code_GS), own_GS)
            found.append((expert_GS, annotate(tf.one_hot(expert_GS, router.p.num_experts), "GSE")))
        return found

    def assign(
        self,
        router: Router,
        choices: Sequence[Choice],
        assign: Callable[[Sequence[Choice]], tuple[Assignment, ...]],
    ) -> tuple[Assignment, ...]:
        """Assigns each token to the experts that it chose; recorded choices keep their kept flags.

        Raises:
          UserError: the router learns, but does not let its experts be replaced.
        """
        if router.is_learned and router.path not in self.asked:
            raise UserError(
                f"{router.path}: {type(router).__name__} computes its choices in a way that "
                "run.record_choices and run.replay_choices do not reach; a router that calls "
                "selection.settled was expected"
            )
        code_GSk = _given(router, len(choices))
        given = list(choices)
        if code_GSk is not None:
            codes = tf.unstack(code_GSk, axis=-1)
            given = [_kept(*pair) for pair in zip(choices, codes, strict=True)]
        made = [
            # The share of dropped tokens is of those that asked without the replay, too.
            dataclasses.replace(made, wanted_GS=tf.maximum(made.wanted_GS, own.wanted_GS))
            for made, own in zip(assign(given), choices, strict=True)
        ]
        if self.rows:
            self._record(router, made)
        return tuple(made)

    def _record(self, router: Router, made: Sequence[Assignment]) -> None:
        """Adds the choices of these rows to the choices of the whole batch."""
        codes = [code_of(a.expert_GS, tf.cast(a.kept_GS, tf.int32)) for a in made]
        now = token_context.current()
        assert now.choices is not None
        code_BLk = now.groups.merge(tf.cast(tf.stack(codes, -1), tf.float32))
        rows_B = now.choices[_ROWS][:, 0]
        # Micro-batches and interleaved parts each have some of the rows, and are summed.
        code_BLk = tf.math.unsorted_segment_sum(code_BLk, rows_B, self.rows)
        context.current().add_sum(router.path, code_BLk)


def _kept(choice: Choice, code_GS: tf.Tensor) -> Choice:
    """Returns a choice that asks for slots where it was recorded as kept."""
    kept_GS = tf.cast(kept_of(code_GS), tf.float32)
    wanted_GS, counted_GS = (
        tf.where(code_GS > 0, kept_GS, own_GS) for own_GS in (choice.wanted_GS, choice.counted_GS)
    )
    return dataclasses.replace(choice, wanted_GS=wanted_GS, counted_GS=counted_GS)


def _given(router: Router, experts: int) -> tf.Tensor | None:
    """Returns the choices int32 [G,S,k] that a router replays; None if it replays none.

    Args:
      router: the router. In a loop it stands for the routers of all iterations.
    """
    now, iteration = token_context.current(), context.current().iteration
    paths = iteration.repetition.paths(router.path) if iteration else [router.path]
    given = now.choices or {}
    if not all(path in given for path in paths):
        return None
    found = [given[path] for path in paths]
    if found[0].shape[-1] != experts:
        raise UserError(
            f"{router.path}: run.replay_choices has {found[0].shape[-1]} experts of each token; "
            f"{experts} were expected"
        )
    code_BLk = tf.gather(tf.stack(found), iteration.index) if iteration else found[0]
    return now.groups.split(code_BLk)
