"""The common part of the families of encoder-decoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lingvo_gshard.core import Params, UserError
from lingvo_gshard.layers import MixtureOfExperts, Sequential, TransformerStack
from lingvo_gshard.tasks import TranslationTask
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families.experts import loss_coefficient, loss_weight
from lingvo_gshard.wings.preparation.published_inputs import PublishedTranslationInput
from lingvo_gshard.wings.repeat.loop import Repeat

# Published activation -> ours.
_ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


def translation_input(length: int) -> Params:
    """Returns the input of an encoder-decoder."""
    return PublishedTranslationInput.params().set(
        source_length=length, target_length=length, batch_rows=8
    )


def activation_of(config: PublishedConfig, name: str, published: str) -> str:
    """Returns our name of an activation.

    Args:
      config: the config, for messages.
      name: the config's key for the activation, for messages.
      published: the activation's published name.

    Raises:
      UserError: there is no such activation here.
    """
    if published not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise UserError(
            f"{config.where}: {name} is {config.get(name, None)!r}, which is not supported; one of "
            f"{known} was expected"
        )
    return _ACTIVATIONS[published]


def published_activation(activation: str) -> str:
    """Returns the published name of an activation.

    Raises:
      StopIteration: no published model has it.
    """
    return next(name for name, ours in _ACTIVATIONS.items() if ours == activation)


def stacks_of(layers: Sequence[int], **settings: Any) -> tuple[Params, Params]:
    """Returns the Params of the encoder and of the decoder.

    Args:
      layers: number of layers of each.
      **settings: what both have in common.
    """
    encoder = TransformerStack.params().set(moe_every=0, **settings)
    decoder = encoder.copy().set(is_decoder=True)
    for stack, count in zip((encoder, decoder), layers, strict=True):
        stack.num_layers = count
        set_experts(stack)
    return encoder, decoder


def set_experts(stack: Params, every: int = 0, offset: int = 0) -> None:
    """Sets which layers of a stack have experts, and how the layers are run."""
    stack.set(moe_every=every, moe_offset=offset)
    is_even = stack.num_layers % max(every, 1) == 0
    stack.execution = (Repeat if is_even else Sequential).params()


def add_experts(
    config: PublishedConfig, stack: Params, router: Params, every: int, offset: int = 0, k: int = 1
) -> None:
    """Gives layers of a stack experts that drop no token, with the activation of other layers.

    Args:
      router: Params of the router, which get the weights of its losses.
      every: the period of the layers with experts.
      offset: see `TransformerStack`.
      k: experts of a token if each choice counts as a whole token in the published loss, else 1.
    """
    stack.moe = MixtureOfExperts.params().set(
        num_experts=config.get("num_experts"),
        router=router.copy(),
        dispatch=DroplessDispatch.params(),
    )
    stack.moe.experts.activation = stack.layer.feed_forward.activation
    set_experts(stack, every, offset)
    stack.moe.router.set(
        auxiliary_loss_weight=loss_weight(config.get("router_aux_loss_coef", 0.001), stack, k),
        z_loss_weight=loss_weight(config.get("router_z_loss_coef", 0.001), stack),
    )


def experts_config(stack: Params, k: int = 1) -> dict[str, Any]:
    """Returns what `add_experts` reads, and keys with one value, from the Params of a stack."""
    router = stack.moe.router
    return {
        "num_experts": stack.moe.num_experts,
        "router_bias": router.use_bias,
        "router_dtype": "float32",
        "router_aux_loss_coef": loss_coefficient(router.auxiliary_loss_weight, stack, k),
        "router_z_loss_coef": loss_coefficient(router.z_loss_weight, stack),
    }


def task_of(config: PublishedConfig, encoder: Params, decoder: Params) -> Params:
    """Returns a translation task with one vocabulary. Both sides and the softmax share a table."""
    size = config.get("vocab_size")
    return TranslationTask.params().set(
        model_dim=config.get("d_model"),
        source_vocabulary_size=size,
        target_vocabulary_size=size,
        encoder=encoder,
        decoder=decoder,
        share_embeddings=True,
        label_smoothing=0.0,
    )
