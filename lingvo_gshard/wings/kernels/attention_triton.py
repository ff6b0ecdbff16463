"""Attention for GPUs in Pallas: FlashAttention-2 with all that an AttentionMask can say.

The forward pass keeps running sums over blocks of keys; the backward pass computes the weights
again from the log of the softmax' sums (Dao 2023, arXiv 2307.08691, algorithms 1 and 2). Blocks
that the positions hide from all queries of a tile are skipped. jax's own kernel for Triton knows
neither windows, caps, learned biases, sinks, nor heads that share keys.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from lingvo_gshard.core import jax, jnp
from lingvo_gshard.core.lazy import pallas, pallas_triton
from lingvo_gshard.wings.kernels.call import HIDDEN, AttentionCall, Operands, pad
from lingvo_gshard.wings.kernels.distance_bias import DistanceBias, added_by_bucket
from lingvo_gshard.wings.kernels.triton_rows import dot, load_rows, padded_dim, store_rows
from lingvo_gshard.wings.kernels.weight_dropout import DropoutOperands, TileDropout


def forward(call: AttentionCall, *operands: jax.Array, interpret: bool = False) -> tuple:
    """Returns the output and the log of the softmax' sums. Arguments are as in attention_tpu.py."""
    tiles = _Tiles.of(call, operands, _forward_blocks(operands), interpret)
    query, _, values = operands[:3]
    padded = tiles.operands.query
    shape = (tiles.batch, tiles.heads, tiles.padded_queries)
    mixed_shape = jax.ShapeDtypeStruct((*shape, values.shape[3]), query.dtype)
    mixed, log_sums = tiles.call(
        _forward_tile,
        (tiles.padded_queries // tiles.block_q, tiles.batch, tiles.heads),
        [(padded, tiles.query_tile(padded)), *tiles.whole_keys(), *tiles.options(), *tiles.sink()],
        [
            (mixed_shape, tiles.query_tile(values)),
            (jax.ShapeDtypeStruct(shape, jnp.float32), tiles.query_row()),
        ],
        "attention",
    )
    return mixed[:, :, : tiles.queries], log_sums[:, :, : tiles.queries]


def backward(call: AttentionCall, *operands: jax.Array, interpret: bool = False) -> tuple:
    """Returns the gradients of queries, keys, values, and what the call learns.

    Arguments are as in attention_tpu.py.
    """
    *inputs, mixed, log_sums, d_mixed = operands
    tiles = _Tiles.of(call, inputs, _backward_blocks(inputs), interpret)
    products = mixed.astype(jnp.float32) * d_mixed.astype(jnp.float32)
    # The sum over the keys of each weight times its gradient.
    weighted_BNL = products.sum(-1)
    rows = [pad(x, 2, tiles.padded_queries) for x in (d_mixed, log_sums, weighted_BNL)]
    d_query, *d_biases = _query_gradients(tiles, rows)
    d_keys, d_values = _key_gradients(tiles, rows)
    gradients = [
        d_query[:, :, : tiles.queries],
        *(x[:, :, : tiles.keys] for x in (d_keys, d_values)),
        *(x.sum((0, 2))[:, : tiles.operands.biases.shape[1]] for x in d_biases),
    ]
    if call.has_sinks:
        at_sinks_BNL = jnp.exp(inputs[-1][:, None] - log_sums)
        gradients.append(-(at_sinks_BNL * weighted_BNL).sum((0, 2)))
    return tuple(gradients)


def _query_gradients(tiles: _Tiles, rows: list[jax.Array]) -> list[jax.Array]:
    """Returns the gradient of the queries; with a bias also each tile's part of its gradient."""
    query = tiles.operands.query
    d_mixed, log_sums, weighted = rows
    outputs = [(jax.ShapeDtypeStruct(query.shape, query.dtype), tiles.query_tile(query))]
    if tiles.bias is not None:
        shape = (tiles.batch, tiles.heads, tiles.padded_queries // tiles.block_q)
        buckets = padded_dim(tiles.operands.biases)
        spec = pallas.BlockSpec((None, None, None, buckets), lambda i, b, n: (b, n, i, 0))
        outputs.append((jax.ShapeDtypeStruct((*shape, buckets), jnp.float32), spec))
    return tiles.call(
        _query_gradient_tile,
        (tiles.padded_queries // tiles.block_q, tiles.batch, tiles.heads),
        [
            (query, tiles.query_tile(query)),
            *tiles.whole_keys(),
            *tiles.options(),
            (d_mixed, tiles.query_tile(d_mixed)),
            (log_sums, tiles.query_row()),
            (weighted, tiles.query_row()),
        ],
        outputs,
        "attention_query_gradient",
    )


def _key_gradients(tiles: _Tiles, rows: list[jax.Array]) -> list[jax.Array]:
    query, keys, values = tiles.operands.query, tiles.operands.keys, tiles.operands.values
    d_mixed, log_sums, weighted = rows
    return tiles.call(
        _key_gradient_tile,
        (tiles.padded_keys // tiles.block_k, tiles.batch, tiles.shared_heads),
        [
            (query, tiles.group_rows(query)),
            (keys, tiles.key_tile(keys)),
            (values, tiles.key_tile(values)),
            *tiles.options(of_groups=True),
            (d_mixed, tiles.group_rows(d_mixed)),
            (log_sums, tiles.group_row()),
            (weighted, tiles.group_row()),
        ],
        [(jax.ShapeDtypeStruct(x.shape, x.dtype), tiles.key_tile(x)) for x in (keys, values)],
        "attention_key_gradients",
    )


def _forward_blocks(operands: Any) -> tuple[int, int, int]:
    """Returns the queries and keys of a tile, and its warps, for the size of the heads.

    A tile of queries, and two blocks of keys and values that are loaded ahead, fit into the 99 KiB
    of shared memory that every GPU since Ampere has.
    """
    dim = max(operands[0].shape[3], operands[2].shape[3])
    if operands[0].dtype == jnp.float32 or dim > 128:
        return 64, 32, 4
    return (128, 64, 8) if dim > 64 else (128, 64, 4)


def _backward_blocks(operands: Any) -> tuple[int, int, int]:
    """Returns the queries and keys of a tile of the backward pass, and its warps."""
    dim = max(operands[0].shape[3], operands[2].shape[3])
    if operands[0].dtype == jnp.float32 or dim > 128:
        return 32, 32, 4
    return (64, 64, 8) if dim > 64 else (64, 64, 4)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """The tiles of a call. Rows are padded to whole tiles.

    Attributes:
      operands: the padded operands.
      bias: the learned bias of the padded operands' distances; None if there is none.
      queries: number of queries, without padding.
      keys: number of keys, without padding.
      block_q: queries of a tile.
      block_k: keys of a tile.
    """

    attention: AttentionCall
    operands: Operands
    bias: DistanceBias | None
    queries: int
    keys: int
    block_q: int
    block_k: int
    warps: int
    interpret: bool

    @classmethod
    def of(
        cls, call: AttentionCall, arrays: Any, blocks: tuple[int, int, int], interpret: bool
    ) -> _Tiles:
        """Returns the tiles of a call's operands."""
        operands = Operands.of(call, arrays)
        block_q, block_k, warps = blocks
        queries, keys = operands.query.shape[2], operands.keys.shape[2]
        padded = operands.padded(
            *(-(-n // b) * b for n, b in ((queries, block_q), (keys, block_k)))
        )
        bias = call.buckets and DistanceBias.of(
            call.buckets,
            padded.biases,
            call.first_query,
            padded.query.shape[2],
            padded.keys.shape[2],
        )
        return cls(call, padded, bias, queries, keys, block_q, block_k, warps, interpret)

    @property
    def batch(self) -> int:
        """Size of B."""
        return self.operands.query.shape[0]

    @property
    def heads(self) -> int:
        """Number of heads of queries."""
        return self.operands.query.shape[1]

    @property
    def shared_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.operands.keys.shape[1]

    @property
    def key_dim(self) -> int:
        """Size of D of queries and keys. Triton computes with powers of two, and masks the rest."""
        return self.operands.query.shape[3]

    @property
    def value_dim(self) -> int:
        """Size of D of the values."""
        return self.operands.values.shape[3]

    @property
    def group(self) -> int:
        """Number of heads of queries that share a head of keys."""
        return self.heads // self.shared_heads

    @property
    def padded_queries(self) -> int:
        """Number of queries of whole tiles."""
        return self.operands.query.shape[2]

    @property
    def padded_keys(self) -> int:
        """Number of keys of whole tiles."""
        return self.operands.keys.shape[2]

    def query_tile(self, x: Any) -> Any:
        """Returns the block [block_q,D] of an array of queries, for a grid of (tile, B, N)."""
        shape = (None, None, self.block_q, padded_dim(x))
        return pallas.BlockSpec(shape, lambda i, b, n: (b, n, i, 0))

    def query_row(self) -> Any:
        """Returns the block [block_q] of an array with one number for each query."""
        return pallas.BlockSpec((None, None, self.block_q), lambda i, b, n: (b, n, i))

    def key_tile(self, x: Any) -> Any:
        """Returns the block [block_k,D] of an array of keys, for a grid of (tile, B, heads)."""
        shape = (None, None, self.block_k, padded_dim(x))
        return pallas.BlockSpec(shape, lambda j, b, n: (b, n, j, 0))

    def group_rows(self, x: Any) -> Any:
        """Returns the block [group,L,D] of the queries that share a head of keys."""
        shape = (None, self.group, self.padded_queries, padded_dim(x))
        return pallas.BlockSpec(shape, lambda j, b, n: (b, n, 0, 0))

    def group_row(self) -> Any:
        """Returns the block [group,L] of an array with one number for each query, for a group."""
        shape = (None, self.group, self.padded_queries)
        return pallas.BlockSpec(shape, lambda j, b, n: (b, n, 0))

    def whole_keys(self) -> list[tuple]:
        """Returns the arrays of keys and values, each with its block: all rows of one head."""
        group, count = self.group, self.padded_keys
        return [
            (
                x,
                pallas.BlockSpec(
                    (None, None, count, padded_dim(x)), lambda i, b, n: (b, n // group, 0, 0)
                ),
            )
            for x in (self.operands.keys, self.operands.values)
        ]

    def options(self, of_groups: bool = False) -> list[tuple]:
        """Returns the operands of `_Options`, each with the block that a tile reads.

        Args:
          of_groups: whether a tile is of all heads that share a head of keys, rather than of one.
        """
        segments = [
            (x, pallas.BlockSpec((None, x.shape[1]), lambda i, b, n: (b, 0)))
            for x in self.operands.segments
        ]
        dropout = self.operands.dropout or ()
        dropped = [(x, pallas.BlockSpec(x.shape, lambda i, b, n: (0,))) for x in dropout]
        return segments + dropped + self._bias(self.group if of_groups else None)

    def _bias(self, heads: int | None) -> list[tuple]:
        if self.bias is None:
            return []
        values, buckets = self.bias
        return [
            (values, pallas.BlockSpec((heads, values.shape[1]), lambda i, b, n: (n, 0))),
            (buckets, pallas.BlockSpec(buckets.shape, lambda i, b, n: (0,))),
        ]

    def sink(self) -> list[tuple]:
        """Returns the array of sinks and its block, the logit of one head; none without sinks."""
        sinks = self.operands.sinks
        return [] if sinks is None else [(sinks, pallas.BlockSpec((1,), lambda i, b, n: (n,)))]

    def call(
        self, tile: Callable, grid: tuple, inputs: list[tuple], outputs: list[tuple], name: str
    ) -> list[jax.Array]:
        """Returns what a function computes for all tiles of a grid."""
        return pallas.pallas_call(
            functools.partial(tile, self),
            grid=grid,
            in_specs=[spec for _, spec in inputs],
            out_specs=[spec for _, spec in outputs],
            out_shape=[shape for shape, _ in outputs],
            compiler_params=pallas_triton.CompilerParams(num_warps=self.warps, num_stages=2),
            interpret=self.interpret,
            name=name,
        )(*(x for x, _ in inputs))

    def key_range(self, first: Any) -> tuple[Any, Any]:
        """Returns the blocks of keys that the tile of queries from `first` on may see."""
        call, count = self.attention, -(-self.keys // self.block_k)
        low, high = 0, count
        position = call.first_query + first
        if call.is_causal or call.window:
            last = position + self.block_q - 1 + (0 if call.is_causal else call.window)
            high = jnp.minimum(jax.lax.div(last, self.block_k) + 1, count)
        if call.window:
            low = jax.lax.div(jnp.maximum(position - call.window, 0), self.block_k)
        return low, high

    def query_range(self, first: Any) -> tuple[Any, Any]:
        """Returns the blocks of queries that may see the tile of keys from `first` on."""
        call, count = self.attention, -(-self.queries // self.block_q)
        low, high = 0, count
        position = first - call.first_query
        if call.is_causal or call.window:
            earliest = position - (0 if call.is_causal else call.window)
            low = jax.lax.div(jnp.maximum(earliest, 0), self.block_q)
        if call.window:
            last = jnp.maximum(position + self.block_k - 1 + call.window, -1)
            high = jnp.minimum(jax.lax.div(last + self.block_q, self.block_q), count)
        return low, high

    def split(self, refs: Any) -> tuple[_Options, list]:
        """Returns the references to the operands of `options`, and those behind them."""
        rest, dropout, bias = list(refs), self.operands.dropout, self.bias

        def take(count: int) -> list:
            taken = rest[:count]
            del rest[:count]
            return taken

        segments = tuple(take(len(self.operands.segments)))
        dropout = dropout and DropoutOperands(*take(len(dropout)))
        bias = bias and DistanceBias(*take(len(bias)))
        return _Options(pallas.program_id(1), segments, dropout, bias), rest

    def tile(
        self, refs: _Options, head: Any, first_q: Any, first_k: Any, in_group: Any = None
    ) -> _Tile:
        """Returns what the options say about the weights of a tile of the head of queries `head`.

        If the references are of all heads of a group, `in_group` is the index of the head in it.
        """
        dropout = None
        if refs.dropout is not None:
            queries = refs.dropout.queries[pallas.ds(first_q, self.block_q)]
            keys = refs.dropout.keys[pallas.ds(first_k, self.block_k)]
            terms = refs.dropout.rows[refs.row] + refs.dropout.heads[head]
            index = (queries + terms)[:, None] + keys[None]
            dropout = TileDropout.drawn(self.attention.dropout_rate, index, refs.dropout.key)
        bias = buckets = None
        if refs.bias is not None:
            start = self.padded_queries - 1 + first_k - first_q
            index = start + jnp.arange(self.block_k)[None] - jnp.arange(self.block_q)[:, None]
            values = refs.bias.values
            bias = values[index] if in_group is None else values[in_group, index]
            buckets = refs.bias.buckets[index]
        return _Tile(self.is_visible(first_q, first_k, refs.segments), dropout, bias, buckets)

    def is_visible(self, first_q: Any, first_k: Any, segments: tuple) -> Any:
        """Returns bool [block_q,block_k]: whether each query of a tile sees each key."""
        call = self.attention
        query = call.first_query + first_q + jnp.arange(self.block_q)[:, None]
        key = first_k + jnp.arange(self.block_k)[None]
        visible = key < self.keys
        if call.is_causal:
            visible &= key <= query
        if call.window:
            visible &= (query - key <= call.window) & (key - query <= call.window)
        if segments:
            query_ref, key_ref = segments
            of_queries = query_ref[pallas.ds(first_q, self.block_q)]
            of_keys = key_ref[pallas.ds(first_k, self.block_k)]
            visible &= of_queries[:, None] == of_keys[None]
        return visible


class _Options(NamedTuple):
    """References to the operands that decide about weights, beside queries and keys.

    Attributes:
      row: index of the tile along B.
      segments: segments of queries and keys; empty without segments.
      dropout: what decides which weights are dropped; None if none are.
      bias: the learned bias; None if there is none.
    """

    row: Any
    segments: tuple
    dropout: DropoutOperands | None
    bias: DistanceBias | None


class _Tile(NamedTuple):
    """Visibility, dropout and bias of the weights [block_q,block_k] of a tile.

    Attributes:
      visible: bool, whether each query sees each key.
      dropout: dropout of the weights; None for none.
      bias: float32, the learned bias of each logit; None for none.
      buckets: int32, the bucket of each bias; None for none.
    """

    visible: Any
    dropout: TileDropout | None
    bias: Any
    buckets: Any

    def biased(self, logits: Any) -> Any:
        """Returns logits with the bias added, if there is one."""
        return logits if self.bias is None else logits + self.bias


def _forward_tile(tiles: _Tiles, query_ref: Any, *refs: Any) -> None:
    keys_ref, values_ref, *others, mixed_ref, log_sums_ref = refs
    call = tiles.attention
    options, sinks = tiles.split(others)
    first_q, head = pallas.program_id(0) * tiles.block_q, pallas.program_id(2)
    query = load_rows(query_ref, tiles.key_dim)

    def add_block(j: Any, sums: tuple) -> tuple:
        mixed, largest, total = sums
        first_k = j * tiles.block_k
        keys = load_rows(keys_ref, tiles.key_dim, first_k, tiles.block_k)
        logits, _ = logits_of(call.logit_cap, query, keys)
        tile = tiles.tile(options, head, first_q, first_k)
        logits = jnp.where(tile.visible, tile.biased(logits), HIDDEN)
        new_largest = jnp.maximum(largest, logits.max(-1))
        correction = jnp.exp(largest - new_largest)
        exponentials = jnp.exp(logits - new_largest[:, None])
        values = load_rows(values_ref, tiles.value_dim, first_k, tiles.block_k)
        kept = exponentials if tile.dropout is None else tile.dropout.applied(exponentials)
        product = dot(kept.astype(values.dtype), values)
        total = total * correction + exponentials.sum(-1)
        return mixed * correction[:, None] + product, new_largest, total

    zeros = jnp.zeros((tiles.block_q, mixed_ref.shape[-1]), jnp.float32)
    largest = jnp.full((tiles.block_q,), HIDDEN, jnp.float32)
    total = jnp.zeros((tiles.block_q,), jnp.float32)
    for sink_ref in sinks:
        largest, total = jnp.broadcast_to(sink_ref[...], largest.shape), total + 1.0
    low, high = tiles.key_range(first_q)
    mixed, largest, total = jax.lax.fori_loop(low, high, add_block, (zeros, largest, total))
    # A query has no sum if all of its blocks are skipped.
    total = jnp.where(total == 0, 1.0, total)
    store_rows(mixed_ref, mixed / total[:, None], tiles.value_dim)
    log_sums_ref[...] = largest + jnp.log(total)


def _query_gradient_tile(tiles: _Tiles, query_ref: Any, *refs: Any) -> None:
    keys_ref, values_ref, *others = refs
    options, others = tiles.split(others)
    d_mixed_ref, log_sums_ref, weighted_ref, d_query_ref, *d_biases_refs = others
    first_q, head = pallas.program_id(0) * tiles.block_q, pallas.program_id(2)
    query, d_mixed = load_rows(query_ref, tiles.key_dim), load_rows(d_mixed_ref, tiles.value_dim)
    log_sums, weighted = log_sums_ref[...], weighted_ref[...]

    def add_block(j: Any, sums: tuple) -> tuple:
        d_query, *d_biases = sums
        first_k = j * tiles.block_k
        keys = load_rows(keys_ref, tiles.key_dim, first_k, tiles.block_k)
        values = load_rows(values_ref, tiles.value_dim, first_k, tiles.block_k)
        tile = tiles.tile(options, head, first_q, first_k)
        _, d_logits, slope = _weights(
            tiles.attention.logit_cap, tile, (query, keys, values, d_mixed), (log_sums, weighted)
        )
        d_biases = [added_by_bucket(x, tile.buckets, d_logits) for x in d_biases]
        return d_query + dot((d_logits * slope).astype(keys.dtype), keys), *d_biases

    zeros = [jnp.zeros(ref.shape, jnp.float32) for ref in (d_query_ref, *d_biases_refs)]
    low, high = tiles.key_range(first_q)
    d_query, *d_biases = jax.lax.fori_loop(low, high, add_block, tuple(zeros))
    store_rows(d_query_ref, d_query, tiles.key_dim)
    for ref, x in zip(d_biases_refs, d_biases, strict=True):
        ref[...] = x


def _key_gradient_tile(tiles: _Tiles, query_ref: Any, *refs: Any) -> None:
    keys_ref, values_ref, *others = refs
    options, others = tiles.split(others)
    d_mixed_ref, log_sums_ref, weighted_ref, d_keys_ref, d_values_ref = others
    first_k, shared_head = pallas.program_id(0) * tiles.block_k, pallas.program_id(2)
    keys, values = load_rows(keys_ref, tiles.key_dim), load_rows(values_ref, tiles.value_dim)
    low, high = tiles.query_range(first_k)

    def add_head(head: Any, gradients: tuple) -> tuple:
        def add_block(i: Any, gradients: tuple) -> tuple:
            d_keys, d_values = gradients
            first_q = i * tiles.block_q
            query = load_rows(query_ref, tiles.key_dim, first_q, tiles.block_q, head)
            d_mixed = load_rows(d_mixed_ref, tiles.value_dim, first_q, tiles.block_q, head)
            rows, of_queries = pallas.ds(first_q, tiles.block_q), shared_head * tiles.group + head
            weights, d_logits, slope = _weights(
                tiles.attention.logit_cap,
                tiles.tile(options, of_queries, first_q, first_k, in_group=head),
                (query, keys, values, d_mixed),
                (log_sums_ref[head, rows], weighted_ref[head, rows]),
            )
            d_keys += dot((d_logits * slope).astype(query.dtype).T, query)
            d_values += dot(weights.astype(d_mixed.dtype).T, d_mixed)
            return d_keys, d_values

        return jax.lax.fori_loop(low, high, add_block, gradients)

    zeros = (jnp.zeros(d_keys_ref.shape, jnp.float32), jnp.zeros(d_values_ref.shape, jnp.float32))
    d_keys, d_values = jax.lax.fori_loop(0, tiles.group, add_head, zeros)
    store_rows(d_keys_ref, d_keys, tiles.key_dim)
    store_rows(d_values_ref, d_values, tiles.value_dim)


def logits_of(cap: float, query: Any, keys: Any) -> tuple[Any, Any]:
    """Returns the float32 logits of queries [L,D] and keys [K,D], and their derivatives by q k."""
    return capped(cap, dot(query, keys.T))


def capped(cap: float, products: Any) -> tuple[Any, Any]:
    """Returns the logits that belong to products q k, and the derivatives of the logits by them.

    Args:
      cap: c of c tanh(q k / c); 0 disables it.
      products: float32 products.
    """
    if not cap:
        return products, 1.0
    # tanh by exp, which is exact enough in float32 and needs no library of the device.
    tanh = 1.0 - 2.0 / (jnp.exp(products * (2.0 / cap)) + 1.0)
    return cap * tanh, 1.0 - tanh * tanh


def _weights(cap: float, tile: _Tile, arrays: tuple, statistics: tuple) -> tuple[Any, Any, Any]:
    """Returns the float32 weights of a tile, the gradients of its logits, and their slopes.

    Products q k have the gradients of the logits, times the slopes.

    Args:
      cap: c of c tanh(q k / c); 0 disables it.
      tile: what the options say about the weights.
      arrays: queries, keys, values, and the gradients of the outputs.
      statistics: the log of each query's sum, and the sum of its weights times their gradients.
    """
    query, keys, values, d_mixed = arrays
    log_sums, weighted = (x[:, None] for x in statistics)
    logits, slope = logits_of(cap, query, keys)
    weights = jnp.where(tile.visible, jnp.exp(tile.biased(logits) - log_sums), 0.0)
    kept, d_weights = weights, dot(d_mixed, values.T)
    if tile.dropout is not None:
        kept, d_weights = (tile.dropout.applied(x) for x in (weights, d_weights))
    return kept, weights * (d_weights - weighted), slope
