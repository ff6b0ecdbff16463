"""PreparedTranslationInput: packed batches of sentence pairs that gshard-prepare has tokenized."""

from __future__ import annotations

import functools

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.data import PairInput, Vocabulary, mixture_plan
from lingvo_gshard.wings.preparation.prepared import manifest
from lingvo_gshard.wings.preparation.prepared.base_input import PreparedInput


class PreparedTranslationInput(PairInput, PreparedInput):
    """Mixes and packs sentence pairs. Batches are described in `packing.pack`."""

    content = manifest.PAIRS
    _limited_sides = ("source", "target")

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define(
            "short_buckets",
            (),
            "Triples (rows, source length, target length) of further shapes of batches, for pairs "
            "that fit. A step is compiled for each. Pairs go to the shortest bucket that holds "
            "them.",
        )
        p.define(
            "source_vocabulary_size", 0, "Source's ids that plans assume without data.", minimum=0
        )
        p.define(
            "target_vocabulary_size", 0, "Target's ids that plans assume without data.", minimum=0
        )
        return p

    @classmethod
    def buckets_of(cls, params: Params) -> list[mixture_plan.Bucket]:
        """Returns rows, source length and target length of each bucket, the shortest first."""
        (longest,) = super().buckets_of(params)
        try:
            shorter = [tuple(map(int, bucket)) for bucket in params.short_buckets]
            is_right = all(len(bucket) == 3 and min(bucket) >= 1 for bucket in shorter)
        except (TypeError, ValueError):
            is_right = False
        if not is_right:
            raise UserError(
                f"short_buckets is {params.short_buckets!r}; a tuple of triples (rows, source "
                "length, target length) was expected, such as ((64, 32, 16),)"
            )
        ordered = [*sorted(shorter, key=lambda bucket: bucket[1:]), longest]
        for bucket, longer in zip(ordered, ordered[1:], strict=False):
            if bucket[1] > longer[1] or bucket[2] > longer[2] or bucket[1:] == longer[1:]:
                raise UserError(
                    f"short_buckets: rows of {bucket[1]}, {bucket[2]} do not fit into those of "
                    f"{longer[1]}, {longer[2]}"
                )
        return ordered  # pyright: ignore[reportReturnType]

    @classmethod
    def configured_vocabulary_sizes(cls, params: Params) -> dict[str, int]:
        """Returns the sizes that the manifest or else the Params have."""
        by_side = {
            entry.side: entry.size for entry in manifest.described_vocabularies(params.directory)
        }
        joint = by_side.get(manifest.JOINT)
        return {
            side: by_side.get(side, joint) or params.get(f"{side}_vocabulary_size")
            for side in ("source", "target")
        }

    @functools.cached_property
    def _vocabularies(self) -> tuple[Vocabulary, Vocabulary]:  # pyright: ignore[reportIncompatibleVariableOverride]
        found = self._prepared_vocabularies
        return found["source"], found["target"]

    @property
    def languages(self) -> tuple[str, ...]:
        """The source languages of the training rows, sorted."""
        return tuple(sorted({group.language for group in self.table("train").groups}))
