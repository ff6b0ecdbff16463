"""annotate: says by letters which dimensions a tensor has, and so how it may be split."""

import tensorflow as tf

from lingvo_gshard.sharding.letters import check_layout


def annotate(tensor: tf.Tensor, layout: str) -> tf.Tensor:
    """Returns the tensor, marked with its layout; on one device that changes nothing.

    Raises ValueError if the layout has an unknown letter or another rank than the tensor.
    """
    check_layout(layout, tensor.shape.rank)
    return tensor
