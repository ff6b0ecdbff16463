"""Token embeddings, positional embeddings, and the softmax over the vocabulary."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np

from lingvo_gshard.core import context, initializers, tf
from lingvo_gshard.core.autodiff.custom_gradient import custom_gradient
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.layer import TABLE, Layer, layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.shapes import known_sizes
from lingvo_gshard.layers import products
from lingvo_gshard.layers.losses import CrossEntropy, LossOfProducts, Objective
from lingvo_gshard.sharding import annotate, current_partitioning, mesh_in_use, xla


class TokenEmbedding(Layer):
    """Embeds token ids, scaled. Its table can also be the weight of the softmax.

    Vaswani et al. 2017, arXiv 1706.03762, section 3.4.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("vocabulary_size", 0, "Size of V.", minimum=1)
        p.define("model_dim", 0, "Size of M.", minimum=1)
        p.define("scale", 0.0, "Factor of the embeddings; 0 for sqrt(M).", minimum=0)
        p.define(
            "is_softmax_weight",
            False,
            "Whether a softmax reads the table as well, which then is gathered once for both.",
            changes_results=False,
        )
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        sizes = {"V": p.vocabulary_size, "M": p.model_dim}
        self.create_variable("table", "VM", sizes, initializers.fan_in(p.model_dim), role=TABLE)

    @layer_method
    def fprop(self, theta: NestedMap, ids_BL: tf.Tensor) -> tf.Tensor:
        """Returns the float32 embeddings [B,L,M] of integer ids in [0, V)."""
        scale = self.p.scale or math.sqrt(self.p.model_dim)
        ids_BL = tf.convert_to_tensor(ids_BL)
        axes = self._exchanged_axes(theta.table, ids_BL)
        if axes:
            is_gathered = self.p.is_softmax_weight
            rows_BLM = _exchanged_rows(theta.table, ids_BL, axes, is_gathered)
            return annotate(rows_BLM, "BLM") * scale
        table_VM = products.whole_rows(theta.table, "VM")
        # The lookup runs where the shards of V are. Only its result is split by L.
        is_single = ids_BL.shape.num_elements() == 1
        # XLA turns the lookup of a single id into a slice, and then gathers the table to slice it.
        ids_BL = tf.tile(ids_BL, [1, 2]) if is_single else ids_BL
        ids_BL = annotate(ids_BL, "BL", reserved="V")
        rows_BLM = annotate(products.look_up(table_VM, ids_BL), "BLM", reserved="V")
        rows_BLM = rows_BLM[:, :1] if is_single else rows_BLM
        return annotate(rows_BLM, "BLM") * scale

    @layer_method
    def _exchanged_axes(self, table: tf.Tensor | NestedMap, ids_BL: tf.Tensor) -> tuple[str, ...]:
        """Returns the mesh axes along which parts of rows are exchanged; none to gather the table.

        The axes split M of the table as well as the tokens.
        """
        current = current_partitioning()
        # XLA adds the float32 gradients of both uses before it sums them over devices.
        is_summed_once = self.p.is_softmax_weight and not products.table_dtype()
        is_stored = isinstance(table, NestedMap)
        if current is None or is_summed_once or is_stored or ids_BL.shape.rank != 2:
            return ()
        of_V, of_M = current.spec_split(self.variable_specs().table)
        batch, length = current.split("BL", path=context.layer_path(), reserved="V")
        rows, positions = known_sizes(ids_BL.shape)
        parts = current.parts(of_M)
        is_even = rows % current.parts(batch) == 0 and self.p.model_dim % parts == 0
        if of_V or parts == 1 or not is_even or not set(of_M) <= set(batch):
            return ()
        tokens = rows * positions // current.parts((*batch, *length))
        return of_M if exchanges_rows(tokens, self.p.vocabulary_size) else ()

    @layer_method
    def logits(self, theta: NestedMap, x_BLM: tf.Tensor) -> tf.Tensor:
        """Returns the logits [B,L,V] of a softmax whose weight is this table."""
        if "softmax" in theta:
            return products.multiply("BLM,MV->BLV", x_BLM, theta.softmax)
        # As in fprop, so that a table that is split by M is gathered for both at once.
        table_VM = products.whole_rows(theta.table, "VM")
        with products.unrounded():
            return products.multiply("BLM,VM->BLV", x_BLM, table_VM)

    @layer_method
    def cross_entropy(
        self, theta: NestedMap, x_BLM: tf.Tensor, objective: Objective, loss: LossOfProducts
    ) -> CrossEntropy:
        """Returns the loss of a softmax whose weight is this table; see `loss_without_logits`."""
        table_VM = products.whole_rows(theta.table, "VM")
        return loss(x_BLM, table_VM, "VM", objective)


def exchanges_rows(tokens: int, rows: int) -> bool:
    """Returns whether devices exchange rows of their tokens: these are fewer bytes than the table.

    Gradients of the tokens, float32, are twice as large as the rows of a 16-bit table.
    """
    return 2 * tokens <= rows


def _exchanged_rows(
    table_VM: tf.Tensor, ids_BL: tf.Tensor, axes: tuple[str, ...], is_gathered: bool
) -> tf.Tensor:
    """Returns float32 rows [B,L,M] of a table that is split along M.

    Rows are rounded to `table_dtype`. Each device looks up its part of the rows of all tokens, and
    an all-to-all brings the parts of a row together. If the table is gathered, each device looks up
    whole rows of its own tokens instead.

    Gradients of the rows are always exchanged, in float32. Each device receives its part of the
    gradients of all tokens and adds up those with equal ids. No device holds a full gradient of the
    table.

    Args:
      ids_BL: integers in [0, V).
      axes: the mesh axes that split M of the table.
      is_gathered: whether the table is gathered, since a softmax reads all of it in any case.
    """
    mesh, dtype = mesh_in_use(), products.table_dtype() or table_VM.dtype
    assert mesh is not None
    whole_ids_BL, parts_of_M = xla.tile(ids_BL, ((), ()), mesh), ((), (), axes)

    @custom_gradient
    def compute(table_VM: tf.Tensor) -> Any:
        def gradient(d_rows_BLM: tf.Tensor) -> tf.Tensor:
            d_parts_BLM = xla.tile(d_rows_BLM, parts_of_M, mesh)
            sums_VM = tf.math.unsorted_segment_sum(d_parts_BLM, whole_ids_BL, table_VM.shape[0])
            rounded_VM = tf.cast(xla.tile(sums_VM, ((), axes), mesh), dtype)
            return tf.cast(rounded_VM, table_VM.dtype)

        if is_gathered:
            local_ids_BL = annotate(ids_BL, "BL", reserved="V")
            rows_BLM = tf.gather(products.whole_rows(table_VM, "VM"), local_ids_BL)
        else:
            rows_BLM = tf.cast(tf.gather(table_VM, whole_ids_BL), dtype)
            rows_BLM = xla.tile(rows_BLM, parts_of_M, mesh)
        return tf.cast(annotate(rows_BLM, "BLM", reserved="V"), tf.float32), gradient

    return cast(tf.Tensor, compute(xla.tile(table_VM, ((), axes), mesh)))


class Softmax(Layer):
    """Computes logits over the vocabulary with a weight of its own."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("vocabulary_size", 0, "Size of V.", minimum=1)
        p.define("model_dim", 0, "Size of M.", minimum=1)
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        sizes = {"V": p.vocabulary_size, "M": p.model_dim}
        self.create_variable("w", "MV", sizes, initializers.fan_in(p.model_dim), inputs="M")

    @layer_method
    def fprop(self, theta: NestedMap, x_BLM: tf.Tensor) -> tf.Tensor:
        """Returns logits [B,L,V]."""
        with products.unrounded():
            return products.product(self, theta, "w", "BLM,MV->BLV", x_BLM)

    @layer_method
    def cross_entropy(
        self, theta: NestedMap, x_BLM: tf.Tensor, objective: Objective, loss: LossOfProducts
    ) -> CrossEntropy:
        """Returns the loss of the logits, which are not all computed; see `loss_without_logits`."""
        x_BLM, w_MV = products.factors(self, theta, "w", "BLM,MV->BLV", x_BLM)
        return loss(x_BLM, w_MV, "MV", objective)


class SinusoidalPositions(Layer):
    """sin and cos of position / 10000^(2i/M). Vaswani et al. 2017, arXiv 1706.03762, 3.5."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M; even.", minimum=1)
        p.define("max_length", 1024, "Number of positions.", minimum=1)
        p.define("first_position", 0, "Number that stands for position 0.", minimum=0)
        p.define("reaches_base", False, "Whether the largest timescale is 10000, as M2M-100's.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        if self.p.model_dim % 2:
            raise UserError(f"{path}.model_dim: {self.p.model_dim} is odd; even was expected")
        if self.p.reaches_base and self.p.model_dim < 4:
            raise UserError(
                f"{path}.model_dim: {self.p.model_dim} with {path}.reaches_base; 4 or more was "
                "expected"
            )

    @layer_method
    def fprop(self, theta: NestedMap, positions_BL: tf.Tensor) -> tf.Tensor:
        """Returns [B,L,M] for integer positions in [0, max_length).

        Raises:
          UserError: L exceeds max_length.
        """
        _check_length(self, positions_BL)
        p = self.p
        table = sinusoids(p.max_length, p.model_dim, p.first_position, p.reaches_base)
        return annotate(tf.gather(tf.constant(table), positions_BL), "BLM")


class LearnedPositions(Layer):
    """Learned embeddings of positions."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.", minimum=1)
        p.define("max_length", 1024, "Number of positions.", minimum=1)
        p.define("first_position", 0, "Row of the table that stands for position 0.", minimum=0)
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        sizes = {"L": self.p.first_position + self.p.max_length, "M": self.p.model_dim}
        self.create_variable("table", "LM", sizes, initializers.normal(0.02), role=TABLE)

    @layer_method
    def fprop(self, theta: NestedMap, positions_BL: tf.Tensor) -> tf.Tensor:
        """Returns [B,L,M] for integer positions in [0, max_length).

        Raises:
          UserError: L exceeds max_length.
        """
        _check_length(self, positions_BL)
        rows_BL = positions_BL + self.p.first_position
        return annotate(products.look_up(products.whole_rows(theta.table, "LM"), rows_BL), "BLM")


def _check_length(layer: Layer, positions_BL: tf.Tensor) -> None:
    """Raises ValueError if rows are too long. XLA would clip their positions silently."""
    length = positions_BL.shape[1]
    if length > layer.p.max_length:
        raise UserError(
            f"{layer.path}.max_length: {layer.p.max_length} is less than the row length, {length}"
        )


def sinusoids(
    length: int, model_dim: int, first: int = 0, reaches_base: bool = False
) -> np.ndarray:
    """Returns float32 [length, model_dim]: sines in the first half, cosines in the second.

    Args:
      first: number of the first position.
      reaches_base: whether the last timescale is 10000.
    """
    half = model_dim // 2
    timescales = 10000.0 ** (np.arange(half) / (half - 1 if reaches_base else half))
    angles = (first + np.arange(length)[:, None]) / timescales[None, :]
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
