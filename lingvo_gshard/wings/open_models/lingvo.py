"""LingvoModel: a TF1 checkpoint of a language model of Lingvo's GShard layers.

DenseBuilder or MoEBuilder makes the layers of UniTransformer there
(https://github.com/tensorflow/lingvo/blob/master/lingvo/core/gshard_builder.py). lingvo.json says
which weight each variable becomes. The Params of the model come from an experiment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from lingvo_gshard.core import Params, UserError, explained, objects
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.training import experiments
from lingvo_gshard.wings.fine_tuning.adapters import without_factors
from lingvo_gshard.wings.fine_tuning.preferences import without_reference
from lingvo_gshard.wings.open_models.importing import weight_specs
from lingvo_gshard.wings.open_models.shards import Box, Source, check_tensors
from lingvo_gshard.wings.open_models.table import TensorPattern
from lingvo_gshard.wings.open_models.weight_mapping import WeightMapping

_TABLE = objects.table_beside(__file__, "lingvo.json", tuple[TensorPattern, ...])
# The part of a name after the task's own. Slots and averages of a variable end otherwise.
_WEIGHT = re.compile(r"^(?:.*?/)?((?:decoder|dec_emb|dec_pos_emb)/.*|softmax_bias)/var$")
_OTHERS = re.compile(r".*/var/.*|global_step|.*beta\d_power")
# Variables of models that are not read, and what to do.
_UNREAD = {
    r"(?:.*/)?enc(?:oder|_emb)/.*": "an encoder. Only models of decoder layers are read: leave out "
    "`init_from` to train an encoder and a decoder from the start",
    r"(?:.*/)?decoder/(?:.*/)?blocks/.*": "repeated layers (use_repeat_layer). Write a checkpoint "
    "whose variables are those of single layers, such as decoder/layer_000/ln/w/scale/var",
}
_LAYER = re.compile(r"^(\d+)/(attention|feed_forward)")


def is_lingvo(prefix: str | os.PathLike) -> bool:
    """Returns whether a path is the prefix of a checkpoint's files."""
    return objects.is_file(pathlib.Path(f"{os.fspath(prefix)}.index"))


@dataclasses.dataclass(frozen=True, slots=True)
class _Variable(Source):
    """A variable of a checkpoint, with the shape that a weight needs."""

    get: Callable[[], np.ndarray]

    def read_box(self, box: Box) -> tuple[np.ndarray, int]:
        with _reading(self.name):
            whole = self.get().reshape(self.shape)
        return whole[tuple(slice(*each) for each in box)], whole.nbytes


class LingvoModel:
    """The weights of a checkpoint that an experiment's model starts with."""

    def __init__(self, prefix: str | os.PathLike, params: Params):
        """Finds the variables; UserError if one is missing, unknown, or of another shape."""
        self._input = params.input.instantiate()
        params = params.copy().set(task=experiments.with_vocabulary_sizes(params.task, self._input))
        specs = without_reference(without_factors(weight_specs(params)))
        pieces = WeightMapping.of(_TABLE, specs).pieces.items()
        self.mapping = WeightMapping(
            {_LAYER.sub(_layer, name): p for name, p in pieces}, dict(specs.flatten_items())
        )
        shapes = {name: p[0].published_shape for name, p in self.mapping.pieces.items()}
        with _reading(os.fspath(prefix)):
            reader: Any = tf.train.load_checkpoint(os.fspath(prefix))
        found = reader.get_variable_to_shape_map()
        kept = {_WEIGHT.sub(r"\1", name): name for name in found if not _OTHERS.fullmatch(name)}
        self.left_out = len(found) - len(kept)
        for unread, advice in _UNREAD.items():
            if name := next(filter(re.compile(unread).fullmatch, sorted(kept.values())), None):
                raise UserError(f"{os.fspath(prefix)}: {name} is of {advice}")
        self.tensors: dict[str, Source] = {}
        for ours, name in sorted(kept.items()):
            shape, wanted = tuple(found[name]), shapes.get(ours, ())
            # Lingvo may combine the dimensions of heads (attention_combine_dims).
            if "/w/w" in ours and math.prod(shape) == math.prod(wanted):
                shape = wanted
            get = functools.partial(reader.get_tensor, name)
            self.tensors[ours] = _Variable(ours, shape, "", get)
        check_tensors(self.tensors, shapes, (), pathlib.Path(prefix))
        self.pieces = self.mapping.of_weights().__getitem__

    def write_extras(self, directory: pathlib.Path) -> None:
        """Writes the vocabulary of the experiment, which the checkpoint does not have."""
        self._input.save_vocabularies(directory)


def _reading(what: str) -> contextlib.AbstractContextManager[None]:
    """Makes errors of TensorFlow's reader UserErrors."""
    kinds = tf.errors.OpError, LookupError, RuntimeError, ValueError
    return explained(f"{what}: the checkpoint cannot be read", *kinds)


def _layer(name: re.Match[str]) -> str:
    """Returns Lingvo's name of half of a layer: attention and feed-forward are numbered in turn."""
    return f"decoder/layer_{2 * int(name[1]) + (name[2] == 'feed_forward'):03d}"
