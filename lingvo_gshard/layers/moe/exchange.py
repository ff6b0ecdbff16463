"""Exchange: rows of tokens from the devices that have them to those that have their experts.

With G and E on one mesh axis, `GECM` is split by groups and `EGCM` by experts: the step from one to
the other is the all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from lingvo_gshard.core.params import Configurable
from lingvo_gshard.sharding import annotate

# Name scopes, within that of the layer, of what moves tokens to experts and back.
DISPATCH_SCOPE, COMBINE_SCOPE = "dispatch", "combine"


class Exchange(Configurable):
    """Has experts compute what groups have put into their buffers."""

    def run(self, x_GECM: tf.Tensor, compute: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """Returns [G,E,C,M], compute([E,G,C,M]) of the experts' inputs, back at their groups."""
        with tf.name_scope(DISPATCH_SCOPE):
            x_EGCM = annotate(tf.transpose(x_GECM, (1, 0, 2, 3)), "EGCM")
        y_EGCM = compute(x_EGCM)
        with tf.name_scope(COMBINE_SCOPE):
            return annotate(tf.transpose(y_EGCM, (1, 0, 2, 3)), "GECM")
