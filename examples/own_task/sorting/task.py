"""SortingTask: a Transformer encoder writes the digits that it reads in order."""

import tensorflow as tf

from lingvo_gshard.core.flops import TokenShape
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.embedding import SinusoidalPositions, Softmax, TokenEmbedding
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.tasks import Task
from lingvo_gshard.wings.facts.flops import flops

DIGITS = 10


class SortingTask(Task):
    """Predicts at each position the digit that a sorted row has there."""

    @classmethod
    def params(cls):
        p = super().params()
        p.define("model_dim", 64, "Size of M.")
        p.define("encoder", TransformerStack.params(), "Params of the encoder.")
        return p

    def __init__(self, params, path=""):
        super().__init__(params, path)
        sizes = {"model_dim": self.p.model_dim}
        self.create_child("embedding", TokenEmbedding.params().set(vocabulary_size=DIGITS, **sizes))
        self.create_child("positions", SinusoidalPositions.params().set(**sizes))
        self.create_child("encoder", self.p.encoder.copy().set(**sizes))
        self.create_child("softmax", Softmax.params().set(vocabulary_size=DIGITS, **sizes))

    @layer_method
    def loss(self, theta, batch):
        """Returns the mean cross-entropy of the digits plus the layers' losses, and metrics."""
        ids_BL, sorted_BL = batch["ids"], batch["sorted"]
        x_BLM = self.embedding.fprop(theta.embedding, ids_BL)
        x_BLM += self.positions.fprop(theta.positions, batch["positions"])
        x_BLM = self.encoder.fprop(theta.encoder, x_BLM, tf.ones_like(ids_BL))
        logits_BLV = self.softmax.fprop(theta.softmax, x_BLM)
        losses_BL = tf.nn.sparse_softmax_cross_entropy_with_logits(sorted_BL, logits_BLV)
        is_right_BL = tf.cast(tf.argmax(logits_BLV, -1, tf.int32) == sorted_BL, tf.float32)
        tokens = float(ids_BL.shape.num_elements())
        cross_entropy = tf.reduce_mean(losses_BL)
        metrics = NestedMap(
            cross_entropy=(cross_entropy, tokens),
            accuracy=(tf.reduce_mean(is_right_BL), tokens),
            tokens=(tf.constant(tokens), 1.0),
        )
        return cross_entropy + self.layer_losses(), metrics

    def token_shape(self, batch):
        """Returns rows and positions, for planning and benchmarks."""
        return TokenShape(*batch["ids"].shape)

    def id_ranges(self):
        """Returns the number of ids in each array, for random batches in benchmarks."""
        return {"ids": DIGITS, "sorted": DIGITS}


@flops.register(SortingTask)
def sorting_flops(task, shape):
    """Returns the operations of a forward pass."""
    return flops(task.encoder, shape) + flops(task.softmax, shape)
