"""FutureToken: predicts, in training, one token further ahead than the model does."""

from __future__ import annotations

from lingvo_gshard.core import initializers
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.lora import product
from lingvo_gshard.layers.norm import RMSNorm
from lingvo_gshard.layers.stacks.transformer_layer import TransformerLayer, inherit

LOCAL_LETTERS = {"m": "model, as the input of a product"}


class FutureToken(Layer):
    """A module of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    It joins the state of each position with the embedding of the token that was predicted there,
    and runs one Transformer layer. The embedding and the softmax are those of the model.
    """

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("model_dim", 0, "Size of M.", minimum=1)
        p.define("norm", RMSNorm.params(), "Params of the norms.")
        p.define("layer", TransformerLayer.params(), "Params of the Transformer layer.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        p = self.p
        norm = inherit(p.norm, model_dim=p.model_dim)
        for name in ("state_norm", "token_norm", "output_norm"):
            self.create_child(name, norm)
        sizes = {"m": p.model_dim, "M": p.model_dim}
        init = initializers.fan_in(2 * p.model_dim)
        self.create_variable("w_state", "mM", sizes, init, inputs="m")
        self.create_variable("w_token", "mM", sizes, init, inputs="m")
        self.create_child("layer", p.layer)

    @layer_method
    def fprop(
        self,
        theta: NestedMap,
        state_BLM: tf.Tensor,
        token_BLM: tf.Tensor,
        segments_BL: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the states [B,L,M] for the next module, and what the softmax reads, [B,L,M].

        Args:
          theta: weights of this layer.
          state_BLM: states of the model, or of the module before.
          token_BLM: embedding of the token that the state predicts.
          segments_BL: int32 segments; 0 where there is no token further ahead.
        """
        state_BLM = self.state_norm.fprop(theta.state_norm, state_BLM)
        token_BLM = self.token_norm.fprop(theta.token_norm, token_BLM)
        x_BLM = product(self, theta, "w_state", "BLm,mM->BLM", state_BLM)
        x_BLM += product(self, theta, "w_token", "BLm,mM->BLM", token_BLM)
        mask = self.layer.self_attention.mask(segments_BL)
        x_BLM = self.layer.fprop(theta.layer, x_BLM, [mask])
        return x_BLM, self.output_norm.fprop(theta.output_norm, x_BLM)

    def flops(self, shape: TokenShape) -> int:
        """Returns the operations of the two products and of the layer."""
        return super().flops(shape) + 2 * 2 * shape.tokens * self.p.model_dim**2
