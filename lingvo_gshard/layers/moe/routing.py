"""Routing: the small description every router returns and every dispatch understands."""

import dataclasses

import tensorflow as tf

from lingvo_gshard.core.nested_map import NestedMap


@dataclasses.dataclass(frozen=True)
class Choice:
    """One expert per token: which, the token's place in its buffer, and the weight of its output.

    All [G,S]: expert and position int32, gate float32 (0 where the token is not kept), kept bool.
    """

    expert_GS: tf.Tensor
    position_GS: tf.Tensor
    gate_GS: tf.Tensor
    kept_GS: tf.Tensor


@dataclasses.dataclass(frozen=True)
class Routing:
    """The choices of every token, first choice first, with the size of the experts' buffers."""

    choices: tuple[Choice, ...]
    num_experts: int
    capacity: int
    auxiliary_loss: tf.Tensor

    def statistics(self, mask_GS: tf.Tensor) -> NestedMap:
        """Returns float32 scalars: load_max_over_mean and dropped_share of the real tokens.

        Load counts the tokens an expert keeps; the mean is over experts and groups together.
        """
        kept = [tf.cast(c.kept_GS, tf.float32) for c in self.choices]
        load_E = tf.add_n(
            [
                tf.einsum("GSE,GS->E", tf.one_hot(c.expert_GS, self.num_experts), k)
                for c, k in zip(self.choices, kept, strict=True)
            ]
        )
        wanted = tf.reduce_sum(mask_GS) * len(self.choices)
        total = tf.reduce_sum(load_E)
        return NestedMap(
            load_max_over_mean=tf.reduce_max(load_E) * self.num_experts / tf.maximum(total, 1.0),
            dropped_share=1.0 - total / tf.maximum(wanted, 1.0),
        )


def expert_capacity(tokens: int, num_experts: int, factor: float, multiple: int = 1) -> int:
    """Returns C: tokens * factor / num_experts, rounded down, then up to `multiple`; at least that.

    Never more than the tokens, rounded up likewise, since an expert takes a token at most once.
    With factor 2 and multiple 1 it is the paper's 2S/E (arXiv 2006.16668, section 2.2); Lingvo
    rounds up to multiples of 4.
    """
    slots = min(int(tokens * factor / num_experts), tokens)
    return max(-(-slots // multiple) * multiple, multiple)
