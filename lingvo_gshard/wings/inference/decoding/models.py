"""Models in inference: functions of tasks that decode, registered for the task's class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from lingvo_gshard.core import NestedMap, UserError, context, face, known_sizes, layer_method, tf
from lingvo_gshard.layers import Memory, load_metrics, token_context
from lingvo_gshard.tasks import LanguageModelTask, TokenTask, TranslationTask
from lingvo_gshard.wings.inference.layers import decoding_weights, transformer
from lingvo_gshard.wings.inference.layers.cached import CacheView, row_view
from lingvo_gshard.wings.inference.layers.stored import with_softmax
from lingvo_gshard.wings.inference.model_facts import NO_TOKEN, ModelFacts


@face
def model_facts(task: TokenTask, length: int, bos_id: int, end_ids: Sequence[int]) -> ModelFacts:
    """Returns what the host must know of a model to decode with it.

    A task with a DECODING registers a function, unless its base class has one.

    Args:
      length: positions of a row in training.
      bos_id: id before the first token.
      end_ids: ids that end a text.

    Raises:
      UserError: the task's class has no function.
    """
    del length, bos_id, end_ids
    name = type(task).__name__
    raise UserError(
        f"{name} has no facts for decoding; register a function for it with "
        f"@model_facts.register({name}), where model_facts is that of {__name__}"
    )


@model_facts.register(LanguageModelTask)
def _(task: LanguageModelTask, length: int, bos_id: int, end_ids: Sequence[int]) -> ModelFacts:
    """Makes texts as long as rows at most."""
    return ModelFacts(
        vocabulary_size=task.p.vocabulary_size,
        bos_id=bos_id,
        end_ids=tuple(sorted(set(end_ids))),
        has_source=False,
        most_source=0,
        most_positions=min(length, _most_positions(task) or length),
        has_states=any(transformer.stack_state_shapes(task.decoder, 1, 1)),
    )


@model_facts.register(TranslationTask)
def _(task: TranslationTask, length: int, bos_id: int, end_ids: Sequence[int]) -> ModelFacts:
    """Does not read the length: rows of training hold many sentences."""
    del length
    positions = _most_positions(task) or task.p.most_source
    return ModelFacts(
        vocabulary_size=task.p.target_vocabulary_size,
        bos_id=bos_id,
        end_ids=tuple(sorted(set(end_ids))),
        has_source=True,
        most_source=min(task.p.most_source, positions),
        most_positions=positions,
    )


def _most_positions(task: TokenTask) -> int | None:
    """Returns the largest number of positions in a text; None if any number is possible."""
    return task.p.positions.max_length if "positions" in task.children else None


@decoding_weights.register(TokenTask)
def _weights(task: TokenTask, theta: NestedMap, *more: str) -> NestedMap:
    """Returns the weights of all parts, and of `more` children, as these read them."""
    children: dict[str, Any] = task.children
    names = [n for n in (task.EMBEDDING, "decoder", "softmax", *more) if n in children]
    weights = {name: decoding_weights(children[name], theta[name]) for name in names}
    if task.p.tie_softmax:
        weights[task.EMBEDDING] = with_softmax(task.shared_embedding, weights[task.EMBEDDING])
    return NestedMap(theta, **weights)


@decoding_weights.register(TranslationTask)
def _(task: TranslationTask, theta: NestedMap) -> NestedMap:
    return _weights(task, theta, "source_embedding", "encoder")


@decoding_weights.register(LanguageModelTask)
def _(task: LanguageModelTask, theta: NestedMap) -> NestedMap:
    """Leaves out what predicts more than the next token."""
    weights = _weights(task, theta)
    weights.pop("future", None)
    return weights


@layer_method
@face
def extend_texts(
    task: TokenTask,
    theta: NestedMap,
    ids_BL: tf.Tensor,
    mask_BL: tf.Tensor,
    view: CacheView,
    caches: Sequence[NestedMap] | None = None,
    memory: NestedMap | None = None,
) -> tuple[tf.Tensor, list[NestedMap], tf.Tensor | None]:
    """Computes new tokens of each row.

    Args:
      theta: `decoding_weights` of the model.
      ids_BL: int32 ids of the new tokens.
      mask_BL: int32, 0 for tokens that are padding; these use no expert.
      view: positions of the new tokens, and the slots that they write to and see.
      caches: the arrays of each layer's `cache_shapes`, each a list of blocks, and of its
        `state_shapes`; None if the slots are the new tokens themselves.
      memory: what `encode_memory` returned; None for a model without one.

    Returns:
      The output [B,L,M], the caches with the new tokens, and the weights [B,N,L,K] over the
      memory in the last layer, or None.
    """
    x_BLM = task.embed(task.EMBEDDING, theta, ids_BL, view.positions_BL)
    with token_context.tokens(ids_BL):
        return transformer.extend_stack(
            task.decoder, theta.decoder, x_BLM, mask_BL, view, caches, memory
        )


@layer_method
def next_logits(task: TokenTask, theta: NestedMap, x_BLM: tf.Tensor) -> tf.Tensor:
    """Returns float32 logits [B,L,V] of the token after each position of `extend_texts`."""
    return tf.cast(task.output_logits(theta, x_BLM), tf.float32)


@layer_method
@face
def encode_memory(task: TranslationTask, theta: NestedMap, ids_BK: tf.Tensor) -> NestedMap:
    """Encodes source sentences, one per row.

    Args:
      theta: `decoding_weights` of the model.
      ids_BK: int32 ids, NO_TOKEN in padding.

    Returns:
      `layers`, the keys and values that each layer of the decoder attends to, and `bias_BK`.
    """
    is_token_BK = tf.not_equal(ids_BK, NO_TOKEN)
    ids_BK = tf.maximum(ids_BK, 0)
    view = row_view(is_token_BK, is_causal=False)
    segments_BK = tf.cast(is_token_BK, tf.int32)
    x_BKM = task.embed_source(theta, ids_BK, view.positions_BL)
    with token_context.tokens(ids_BK):
        output_BKM, _, _ = transformer.extend_stack(
            task.encoder, theta.encoder, x_BKM, segments_BK, view
        )
    return transformer.cache_memory(task.decoder, theta.decoder, Memory(output_BKM, segments_BK))


def expert_gates(
    task: TokenTask, weights: NestedMap, ids_BL: tf.Tensor, source_BK: tf.Tensor | None = None
) -> list[tuple[str, tf.Tensor]]:
    """Returns the gates of the experts that compute each token, as in decoding.

    Args:
      weights: `decoding_weights` of the model.
      ids_BL: int32 tokens of each text, starting with the token before all texts; NO_TOKEN in the
        padding after the text.
      source_BK: int32 tokens of each source, NO_TOKEN in the padding; None for a model without
        sources.

    Returns:
      (path, gates) for each layer with experts, in the order of computation: the layer's path and
      the float32 gates [B,K,E] of the source or [B,L,E] of the text. The gate of an expert that
      does not compute a token is 0. Layers of a compiled loop share a path.
    """
    found = []

    def observe(path: str, value: tf.Tensor) -> None:
        layer, _, name = path.rpartition("/")
        if name == load_metrics.TOKEN_GATES:
            found.append((layer, value))

    with context.scope(training=False, on_output=observe):
        translates = cast(TranslationTask, task)
        memory = None if source_BK is None else encode_memory(translates, weights, source_BK)
        is_token_BL = tf.not_equal(ids_BL, NO_TOKEN)
        view, mask_BL = row_view(is_token_BL, is_causal=True), tf.cast(is_token_BL, tf.int32)
        extend_texts(task, weights, tf.maximum(ids_BL, 0), mask_BL, view, None, memory)
    return found


# Bytes of the float32 logits that exist at once: of long texts and large vocabularies, all of them
# would take gigabytes.
_LOGITS_BYTES = 1 << 28


def token_scores(
    task: TokenTask, weights: NestedMap, ids_BL: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns how likely each token of complete texts is, given the tokens before it.

    Args:
      task: the model, which reads no source.
      weights: `decoding_weights` of the model.
      ids_BL: int32 [B,L+1], the tokens of each text, NO_TOKEN in the padding after the text.

    Returns:
      Three arrays [B,L], each with a value for every token but the first: the float32
      log-probability of the token, the int32 token that is likeliest at this place, and the float32
      log-probability of the likeliest token. Values in padding have no meaning.
    """
    with context.scope(training=False):
        next_BL, ids_BL = tf.maximum(ids_BL[:, 1:], 0), ids_BL[:, :-1]
        is_token_BL = tf.not_equal(ids_BL, NO_TOKEN)
        view, mask_BL = row_view(is_token_BL, is_causal=True), tf.cast(is_token_BL, tf.int32)
        x_BLM, _, _ = extend_texts(task, weights, tf.maximum(ids_BL, 0), mask_BL, view, None, None)
        rows, length = known_sizes(ids_BL.shape)
        size = known_sizes(next_logits(task, weights, x_BLM[:, :1]).shape)[-1]
        at_once = max(_LOGITS_BYTES // (4 * rows * size), 1)
        parts = []
        for begin in range(0, length, at_once):
            part = slice(begin, begin + at_once)
            logits_BLV = next_logits(task, weights, x_BLM[:, part])
            log_z_BL = tf.reduce_logsumexp(logits_BLV, -1)
            chosen_BL = tf.gather(logits_BLV, next_BL[:, part], batch_dims=2)
            largest_BL = tf.reduce_max(logits_BLV, -1)
            best_BL = tf.argmax(logits_BLV, -1, output_type=tf.int32)
            parts.append((chosen_BL - log_z_BL, best_BL, largest_BL - log_z_BL))
        found, best, largest = (tf.concat(each, 1) for each in zip(*parts, strict=True))
        return found, best, largest
