"""Adds to a trace of einsums how programs execute them: in kernels, and in manual regions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from lingvo_gshard.core import Layer, tf
from lingvo_gshard.layers import Attention, MixtureOfExperts
from lingvo_gshard.wings import kernels
from lingvo_gshard.wings.kernels.call import AttentionCall
from lingvo_gshard.wings.planning.search.balanced_dispatch import BalancedDispatch
from lingvo_gshard.wings.planning.search.candidates import Einsum, ExpertRows, Flow


def as_executed(
    einsums: Sequence[Einsum], flows: Sequence[Flow], task: Layer, platform: str
) -> tuple[list[Einsum], list[Flow]]:
    """Returns einsums and flows as a platform's programs execute them.

    Args:
      task: the task that was traced, with a BalancedDispatch for each dropless one.
      platform: one of `platforms.PLATFORMS`, whose kernels attend; "" for none.
    """
    layers = {layer.path: layer for layer in task.all_layers()}
    found = _with_kernels(einsums, layers, platform) if platform else einsums
    return (
        [dataclasses.replace(e, is_dropless=_is_dropless(e, layers)) for e in found],
        [dataclasses.replace(f, rows=_expert_rows(f, layers)) for f in flows],
    )


# Letters of queries by keys. A kernel of attention has one block of them at a time.
_LOGITS = "BNLK"


def _with_kernels(
    einsums: Sequence[Einsum], layers: Mapping[str, Layer], platform: str
) -> list[Einsum]:
    """Returns einsums whose attention is computed as a platform's kernels compute it."""
    shares = {
        e.path: share
        for e in einsums
        if e.result.layout == _LOGITS and (share := _kernel_share(e, layers[e.path], platform))
    }
    return [_by_kernel(e, shares[e.path]) if e.path in shares else e for e in einsums]


def _by_kernel(einsum: Einsum, share: float) -> Einsum:
    """Returns an einsum of a layer whose kernel never has the logits in memory."""
    left, right, result = (
        dataclasses.replace(x, is_virtual=x.layout == _LOGITS)
        for x in (*einsum.operands, einsum.result)
    )
    if not any(x.is_virtual for x in (left, right, result)):
        return einsum
    saved = tuple(x for x in einsum.saved if x.layout != _LOGITS)
    return dataclasses.replace(
        einsum, operands=(left, right), result=result, saved=saved, share=share
    )


def _kernel_share(einsum: Einsum, layer: Layer, platform: str) -> float:
    """Returns the share of queries by keys that a platform's kernel computes; 0: it has none."""
    if not isinstance(layer, Attention) or not layer.kernel.uses_fused:
        return 0.0
    p, (query, keys) = layer.p, einsum.operands
    call = AttentionCall(
        is_causal="is_causal" in p and p.is_causal,
        window=p.window if "window" in p else 0,
        logit_cap=p.logit_cap,
        has_segments=True,
        has_sinks=p.use_sinks,
        dropout_rate=p.dropout_rate,
    )
    if "relative_buckets" in p and p.relative_buckets and platform == "tpu":
        return 0.0
    specs = [tf.TensorSpec(x.shape, tf.as_dtype(x.dtype)) for x in (query, keys, keys)]
    if kernels.attention.obstacle(platform, call, *specs):
        return 0.0
    return kernels.attention.computed_share(platform, call, specs[0], specs[1])


def _expert_rows(flow: Flow, layers: Mapping[str, Layer]) -> ExpertRows | None:
    """Returns what travels between tokens and the experts of a dropless dispatch."""
    layer = _dropless_layer(flow.target_path, layers)
    is_exchange = {"E", "G", "C"} <= set(flow.source.layout) & set(flow.target.layout)
    if layer is None or not is_exchange:
        return None
    dispatch = layer.p.dispatch
    choices = round(layer.router.experts_per_token(layer.router.p))
    return ExpertRows(
        choices, dispatch.bound, dispatch.rows_exchange, itemsize=flow.source.itemsize
    )


def _is_dropless(einsum: Einsum, layers: Mapping[str, Layer]) -> bool:
    is_of_experts = "E" in einsum.operands[1].layout and "C" in einsum.result.layout
    return is_of_experts and _dropless_layer(einsum.path, layers) is not None


def _dropless_layer(path: str, layers: Mapping[str, Layer]) -> MixtureOfExperts | None:
    """Returns the layer with a dropless dispatch that a path, or the path's parent, is of."""
    layer = layers.get(path.removesuffix(".experts"))
    is_mixture = isinstance(layer, MixtureOfExperts)
    return layer if is_mixture and layer.p.dispatch.cls is BalancedDispatch else None
