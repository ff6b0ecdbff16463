"""The conformance registry: every layer with tiny Params and a way to call it.

A new layer adds one line to CASES. test_conformance.py makes a `LayerTest` of it.
"""

from __future__ import annotations

import tensorflow as tf

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import Layer
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers import token_context
from lingvo_gshard.layers.attention.cross_attention import CrossAttention
from lingvo_gshard.layers.dropout import Dropout
from lingvo_gshard.layers.embedding import (
    LearnedPositions,
    SinusoidalPositions,
    Softmax,
    TokenEmbedding,
)
from lingvo_gshard.layers.feed_forward import FeedForward
from lingvo_gshard.layers.moe import (
    EinsumDispatch,
    MixtureOfExperts,
    SwitchRouter,
    Top2Router,
    TopKRouter,
)
from lingvo_gshard.layers.norm import LayerNorm, RMSNorm
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.layers.stacks.transformer_layer import Memory, TransformerLayer
from lingvo_gshard.tasks import LanguageModelTask, TranslationTask
from lingvo_gshard.testing.passes import Case, E, H, M, N, V
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.published_layers.gemma4 import ExpertsBeside, NormalizedRouter
from lingvo_gshard.wings.published_layers.latent_experts import LatentExperts
from lingvo_gshard.wings.published_layers.routers import (
    ExpertChoiceRouter,
    ForcedBalanceRouter,
    GroupLimitedRouter,
    HashRouter,
    LookupRouter,
    SigmoidRouter,
    SinkhornRouter,
)
from lingvo_gshard.wings.repeat.loop import Repeat
from tests.layers.attention import attention_options as attentions
from tests.layers.stacks.executions import loop
from tests.published_layers.streams import small_stack

_EINSUM, _DROPLESS = EinsumDispatch.params(), DroplessDispatch.params()


def _on_x(layer: Layer, theta: NestedMap, inputs: NestedMap) -> tf.Tensor:
    return layer.fprop(theta, inputs.x)


def _on_x_and_mask(layer: Layer, theta: NestedMap, inputs: NestedMap) -> tf.Tensor:
    return layer.fprop(theta, inputs.x, inputs.target_segments)


def _on_x_mask_and_ids(layer: Layer, theta: NestedMap, inputs: NestedMap) -> tf.Tensor:
    with token_context.tokens(inputs.target_inputs):
        return layer.fprop(theta, inputs.x, inputs.target_segments)


def _on_ids(layer: Layer, theta: NestedMap, inputs: NestedMap) -> tf.Tensor:
    return layer.fprop(theta, inputs.target_inputs)


def _on_positions(layer: Layer, theta: NestedMap, inputs: NestedMap) -> tf.Tensor:
    return layer.fprop(theta, inputs.target_positions)


def _as_softmax(layer: TokenEmbedding, theta: NestedMap, inputs: NestedMap) -> tf.Tensor:
    return layer.logits(theta, inputs.x)


def _self_attention(layer: Layer, theta: NestedMap, inputs: NestedMap) -> tf.Tensor:
    return layer.fprop(theta, inputs.x, layer.mask(inputs.target_segments))


def _cross_attention(layer: Layer, theta: NestedMap, inputs: NestedMap) -> tf.Tensor:
    mask = layer.mask(inputs.target_segments, inputs.source_segments)
    return layer.fprop(theta, inputs.x, inputs.memory, mask)


def _encoder_layer(layer: Layer, theta: NestedMap, inputs: NestedMap) -> tf.Tensor:
    return layer.fprop(theta, inputs.x, [layer.self_attention.mask(inputs.target_segments)])


def _decoder_layer(layer: Layer, theta: NestedMap, inputs: NestedMap) -> tf.Tensor:
    mask = layer.self_attention.mask(inputs.target_segments)
    memory_mask = layer.cross_attention.mask(inputs.target_segments, inputs.source_segments)
    return layer.fprop(theta, inputs.x, [mask], inputs.memory, memory_mask)


def _decoder_stack(layer: Layer, theta: NestedMap, inputs: NestedMap) -> tf.Tensor:
    memory = Memory(inputs.memory, inputs.source_segments)
    return layer.fprop(theta, inputs.x, inputs.target_segments, memory)


def _translation_logits(layer: Layer, theta: NestedMap, inputs: NestedMap) -> tf.Tensor:
    return layer.logits(theta, inputs)


def _task_loss(layer: Layer, theta: NestedMap, inputs: NestedMap) -> tf.Tensor:
    return layer.loss(theta, inputs)[0]


def _moe(roomy: bool = True, mode: str = "paper", **values: object) -> Params:
    """Returns Params of a mixture; roomy: experts have capacity for all tokens in evaluation."""
    return _routed_by(Top2Router.params().set(mode=mode), roomy, **values)


def _in_chunks(p: Params) -> Params:
    """Sets an exchange in chunks. Not in low precision, where one bit changes the rounding."""
    p.exchange.chunks = 2
    return p


def _routed_by(router: Params, roomy: bool = True, **values: object) -> Params:
    """Returns Params of a mixture; roomy: experts have capacity for all tokens in evaluation."""
    p = MixtureOfExperts.params().set(model_dim=M, hidden_dim=H, num_experts=E, group_size=5)
    p.router = router.set(evaluation_capacity_factor=float(E if roomy else 0))
    return p.set(**values)


def _published_experts() -> Params:
    """Returns Params of experts as in gpt-oss, and of a shared one."""
    p = _routed_by(TopKRouter.params().set(k=3, use_bias=True, scale=1.5), shared_hidden_dim=H)
    p.experts.set(use_bias=True, activation="clamped_swiglu", gate_alpha=1.5, gate_limit=2.0)
    return p


def _beside() -> Params:
    """Returns Params of experts beside a feed-forward layer, as in Gemma 4."""
    p = _routed_by(NormalizedRouter.params().set(k=2), shared_hidden_dim=H)
    return ExpertsBeside.params().set(**dict(p.items()))


def _latent() -> Params:
    """Returns Params of experts that compute smaller vectors than the layer's."""
    p = _routed_by(TopKRouter.params().set(k=2), shared_hidden_dim=H)
    return LatentExperts.params().set(latent_dim=M // 2, **dict(p.items()))


def _sigmoid() -> Params:
    p = SigmoidRouter.params().set(expert_groups=2, groups_per_token=1, auxiliary_loss_weight=0.1)
    return _routed_by(p)


def _transformer_layer(**values: object) -> Params:
    p = TransformerLayer.params().set(model_dim=M, residual_dropout_rate=0.1, **values)
    p.self_attention.set(num_heads=N, dropout_rate=0.1, is_causal=p.has_cross_attention)
    p.cross_attention.set(num_heads=N, dropout_rate=0.1)
    p.feed_forward.set(hidden_dim=H, activation="gelu")
    return p


def _stack(**values: object) -> Params:
    p = TransformerStack.params().set(num_layers=2, num_heads=N, hidden_dim=H, moe=_moe(), **values)
    p.moe.set(model_dim=0, hidden_dim=0)
    p.moe.experts.activation = "gelu"
    p.layer.feed_forward.activation = "gelu"
    p.set(token_dropout_rate=0.1, input_dropout_rate=0.1, residual_dropout_rate=0.1)
    return p.set(attention_dropout_rate=0.1)


def _pattern() -> Params:
    """Returns Params of a loop in which attentions with and without a window alternate."""
    p = TransformerStack.params().set(model_dim=M, num_heads=N, hidden_dim=H, moe_every=0)
    p.layer.set(norm=RMSNorm.params().set(zero_centered=True), norm_position="both")
    p.layer.feed_forward.set(activation="geglu_tanh", use_bias=False)
    near = attentions.plain(window=1, rotary_fraction=1.0, rotary_base=100.0).set(model_dim=0)
    far = attentions.plain(rotary_fraction=1.0, logit_cap=3.0).set(model_dim=0)
    p.set(num_layers=5, sequential_first=1, attention_pattern=(near, far), is_causal=True)
    return p.set(execution=loop("products"))


def _shared_bias() -> Params:
    """Returns Params of a decoder in a loop whose layers share one relative bias."""
    p = TransformerStack.params().set(model_dim=M, num_heads=N, hidden_dim=H, moe_every=0)
    p.set(num_layers=2, is_decoder=True, execution=loop("full"))
    p.shared_relative_bias.set(buckets=4, max_distance=3)
    return p


def _translation(**values: object) -> Params:
    p = TranslationTask.params().set(
        source_vocabulary_size=V, target_vocabulary_size=V, model_dim=M, **values
    )
    return p.set(encoder=_stack(), decoder=_stack(is_decoder=True))


def _language_model(**values: object) -> Params:
    p = LanguageModelTask.params().set(
        vocabulary_size=V, model_dim=M, add_positions=False, z_loss_weight=0.01, **values
    )
    stack = _stack(is_causal=True).set(num_layers=3, dense_first=1)
    stack.layer.norm = RMSNorm.params()
    stack.layer.feed_forward.activation = "swiglu"
    stack.layer.self_attention.rotary_fraction = 1.0
    return p.set(decoder=stack)


def _vocabulary(params: Params) -> Params:
    return params.set(model_dim=M, vocabulary_size=V)


def _positions(params: Params) -> Params:
    return params.set(model_dim=M, max_length=9)


CASES = (
    Case("LayerNorm", LayerNorm.params().set(model_dim=M), _on_x),
    Case("RMSNorm", RMSNorm.params().set(model_dim=M), _on_x),
    Case("Dropout", Dropout.params().set(rate=0.3), _on_x, draws=True),
    Case("FeedForward", FeedForward.params().set(model_dim=M, hidden_dim=H), _on_x_and_mask),
    Case("TokenEmbedding", _vocabulary(TokenEmbedding.params()), _on_ids),
    Case("TokenEmbedding.logits", _vocabulary(TokenEmbedding.params()), _as_softmax),
    Case("Softmax", _vocabulary(Softmax.params()), _on_x),
    Case("SinusoidalPositions", _positions(SinusoidalPositions.params()), _on_positions),
    Case("LearnedPositions", _positions(LearnedPositions.params()), _on_positions),
    Case("Attention.self", attentions.plain(dropout_rate=0.2), _self_attention, draws=True),
    Case("Attention.causal", attentions.plain(head_dim=3, is_causal=True), _self_attention),
    Case(
        "Attention.cross",
        attentions.plain(CrossAttention, dropout_rate=0.2),
        _cross_attention,
        draws=True,
    ),
    Case("Attention.options", attentions.attention("together"), _self_attention),
    Case("Attention.published", attentions.attention("published"), _self_attention),
    Case("Attention.latent", attentions.latent(use_bias=True), _self_attention),
    Case("Attention.gated", attentions.attention("biases"), _self_attention),
    Case("Attention.indexed", attentions.indexed(), _self_attention),
    Case("Attention.compressed", attentions.compressed(), _self_attention),
    Case("GatedDeltaNet", attentions.delta_net(), _self_attention),
    Case("KimiDeltaAttention", attentions.kimi(), _self_attention),
    Case("Mamba2", attentions.mamba(), _self_attention),
    Case("Attention.keys_for_values", attentions.attention("keys_for_values"), _self_attention),
    Case("Attention.blocks", attentions.blocks(), _self_attention),
    Case("Attention.ring", attentions.ring(), _self_attention),
    Case("MoE.paper", _moe(), _on_x_and_mask, draws=True),
    Case("MoE.lingvo", _moe(mode="lingvo"), _on_x_and_mask, draws=True),
    Case("MoE.paper.einsum", _moe(dispatch=_EINSUM), _on_x_and_mask, draws=True),
    Case("MoE.lingvo.einsum", _moe(True, "lingvo", dispatch=_EINSUM), _on_x_and_mask, draws=True),
    Case("MoE.overflow", _moe(roomy=False), _on_x_and_mask, draws=True, packs=False),
    Case("MoE.chunks", _in_chunks(_moe()), _on_x_and_mask, draws=True),
    Case("MoE.dropless", _moe(False, dispatch=_DROPLESS), _on_x_and_mask, draws=True),
    Case(
        "MoE.top_k",
        _routed_by(
            GroupLimitedRouter.params().set(
                k=2, expert_groups=2, groups_per_token=1, z_loss_weight=0.1, output_masking_rate=0.2
            )
        ),
        _on_x_and_mask,
        draws=True,
    ),
    Case("MoE.beside", _beside(), _on_x_and_mask),
    Case("MoE.latent", _latent(), _on_x_and_mask),
    Case("MoE.published", _published_experts(), _on_x_and_mask),
    Case(
        "MoE.gated_shared",
        _moe(shared_hidden_dim=H, shared_combination="gated"),
        _on_x_and_mask,
        draws=True,
    ),
    Case(
        "MoE.switch",
        _routed_by(SwitchRouter.params().set(priority="gate"), roomy=False),
        _on_x_and_mask,
        draws=True,
        packs=False,
    ),
    Case(
        "MoE.hash",
        _routed_by(HashRouter.params().set(k=2), has_token_ids=True),
        _on_x_mask_and_ids,
    ),
    Case(
        "MoE.looked_up",
        _routed_by(LookupRouter.params().set(k=2, vocabulary_size=V), has_token_ids=True),
        _on_x_mask_and_ids,
    ),
    Case("MoE.sinkhorn", _routed_by(SinkhornRouter.params()), _on_x_and_mask),
    Case(
        "MoE.forced_balance",
        _routed_by(ForcedBalanceRouter.params().set(skew=0.3)),
        _on_x_and_mask,
        packs=False,
    ),
    Case("MoE.sigmoid", _sigmoid(), _on_x_and_mask),
    Case(
        "MoE.sigmoid.loop",
        Repeat.params().set(
            body=(_routed_by(SigmoidRouter.params()),), times=2, rematerialize="full"
        ),
        _on_x_and_mask,
    ),
    Case(
        "MoE.expert_choice",
        _routed_by(ExpertChoiceRouter.params(), roomy=False),
        _on_x_and_mask,
        packs=False,
    ),
    Case(
        "MoE.expert_choice.einsum",
        _routed_by(ExpertChoiceRouter.params(), roomy=False, dispatch=_EINSUM),
        _on_x_and_mask,
        packs=False,
    ),
    Case("TransformerLayer.encoder", _transformer_layer(), _encoder_layer, draws=True),
    Case(
        "TransformerLayer.decoder",
        _transformer_layer(has_cross_attention=True),
        _decoder_layer,
        draws=True,
    ),
    Case("TransformerStack.encoder", _stack(model_dim=M), _on_x_and_mask, draws=True),
    Case("TransformerStack.decoder", _stack(model_dim=M, is_decoder=True), _decoder_stack, True),
    Case(
        "TransformerStack.loop",
        _stack(model_dim=M, is_decoder=True, execution=loop("products"), moe_every=1),
        _decoder_stack,
        draws=True,
    ),
    Case("TransformerStack.pattern", _pattern(), _on_x_and_mask),
    Case("TransformerStack.shared_bias", _shared_bias(), _decoder_stack),
    Case(
        "TransformerStack.streams",
        small_stack(model_dim=M, num_layers=6, has_token_ids=True, execution=loop("full")),
        _on_x_mask_and_ids,
    ),
    Case("TranslationTask.logits", _translation(), _translation_logits, draws=True),
    Case(
        "TranslationTask.loss",
        _translation(share_embeddings=True),
        _task_loss,
        draws=True,
        packs=False,
    ),
    Case("LanguageModelTask.loss", _language_model(), _task_loss, draws=True, packs=False),
    Case(
        "LanguageModelTask.future",
        _language_model(future_tokens=2),
        _task_loss,
        draws=True,
        packs=False,
    ),
)

# Large cases whose parts are also cases.
SLOW = (
    "Attention.ring",
    "TranslationTask.logits",
    "TranslationTask.loss",
    "LanguageModelTask.loss",
    "LanguageModelTask.future",
    "TransformerStack.encoder",
    "TransformerStack.decoder",
    "TransformerStack.loop",
    "TransformerStack.pattern",
    "TransformerStack.shared_bias",
    "TransformerStack.streams",
    "TransformerLayer.encoder",
    "MoE.paper.einsum",
    "MoE.chunks",
    "MoE.forced_balance",
    "MoE.sigmoid",
    "MoE.dropless",
    "MoE.published",
    "MoE.gated_shared",
    "MoE.lingvo.einsum",
    "MoE.expert_choice.einsum",
    "MoE.sigmoid.loop",
    # Their parts have tests of their own.
    "Attention.blocks",
    "Attention.indexed",
    "Attention.compressed",
    "MoE.hash",
    "MoE.looked_up",
    "MoE.lingvo",
)
