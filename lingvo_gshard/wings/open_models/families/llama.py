"""Llama: dense decoders (Llama 3, arXiv 2407.21783, section 3.2), and families that are Llamas.

Helium's rotations have pairs of neighbors. Most layers of CWM (arXiv 2510.02387) have a window. The
feed-forward layers of AFM (`arcee`), Jais 2 and StarCoder2 (arXiv 2402.19173) have two products.
"""

from lingvo_gshard.core import Params
from lingvo_gshard.layers import LayerNorm
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families import family
from lingvo_gshard.wings.open_models.families.decoder import USUAL, decoder
from lingvo_gshard.wings.open_models.families.rope import ROPE
from lingvo_gshard.wings.published_layers.rotary_pairs import NEIGHBORS


def _kinds(config: PublishedConfig) -> list[str]:
    """Returns the type of each layer's attention: the first of four layers has no window."""
    layers = range(config.get("num_hidden_layers"))
    return family.types_of_layers(
        config, [family.SLIDING if index % 4 else family.FULL for index in layers]
    )


def _set_layer_norms(config: PublishedConfig, task: Params) -> None:
    del config
    layer = task.decoder.layer
    layer.norm = LayerNorm.params().set(epsilon=layer.norm.epsilon)


_PARTS = (*USUAL, family.BIASES, family.FEED_FORWARD_BIAS)
FAMILY = decoder("llama", _PARTS)
HELIUM = decoder(
    "helium",
    (
        *USUAL,
        family.INPUT_BIASES,
        family.FEED_FORWARD_BIAS,
        family.always({"attention.rotary_pairs": NEIGHBORS}),
    ),
)
INTERNLM3 = decoder("internlm3", _PARTS)
IQUEST_CODER = decoder("iquestcoder", _PARTS)
CWM = decoder("cwm", (*USUAL, family.FEED_FORWARD_BIAS, family.layered(_kinds)))
# The activation of feed-forward layers with two products.
_ACTIVATION = "decoder.layer.feed_forward.activation"
_SQUARED = (
    family.activation("relu2"),
    family.always({_ACTIVATION: "squared_relu"}),
    *(ROPE, family.BIASES, family.FEED_FORWARD_BIAS),
)
ARCEE = decoder("arcee", _SQUARED)
JAIS2 = decoder("jais2", (*_SQUARED, family.Part(_set_layer_norms)), epsilon="layer_norm_eps")
_BIASES = "attention.use_bias", "attention.use_output_bias", "decoder.layer.feed_forward.use_bias"
STARCODER2 = decoder(
    "starcoder2",
    (
        family.activation("gelu_pytorch_tanh"),
        family.always({_ACTIVATION: "gelu_tanh"}),
        ROPE,
        family.Part(_set_layer_norms),
        family.WINDOW,
        family.setting("use_bias", *_BIASES, null=False),
        family.setting("residual_dropout", "decoder.residual_dropout_rate", null=0.0),
        family.setting("embedding_dropout", "decoder.input_dropout_rate", null=0.0),
    ),
    epsilon="norm_epsilon",
)
