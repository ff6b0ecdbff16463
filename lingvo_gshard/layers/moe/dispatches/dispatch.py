"""The interface of all dispatches."""

from __future__ import annotations

from lingvo_gshard.core.config.params import Configurable, Params
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe.exchange import Exchange
from lingvo_gshard.layers.moe.experts import Experts
from lingvo_gshard.layers.moe.routing import Routing


class Dispatch(Configurable):
    """Sends each token to the experts of its routing and combines their outputs.

    A new dispatch is a subclass in its own file. It defines `run` and overrides the following
    if the default does not apply. It has no weights.

    Attributes:
      is_dropless: whether experts compute every token sent to them, so that they have no capacity.
      is_vectorizable: whether `sharding.vectorize` can compute it for all stages of a pipeline as
        one operation. It cannot if the dispatch contains loops or a manual region.
      has_manual_regions: whether it computes in manual regions on a mesh.
    """

    is_dropless = False
    is_vectorizable = True
    has_manual_regions = False

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params)
        self.path = path

    def check_exchange(self, exchange: Params, path: str) -> None:
        """Raises ValueError if the dispatch cannot honor an option of the exchange.

        Args:
          exchange: the layer's Params of `Exchange`.
          path: their Params path, for the message.
        """

    def run(
        self,
        routing: Routing,
        x_GSM: tf.Tensor,
        experts: Experts,
        theta: NestedMap,
        exchange: Exchange,
    ) -> tf.Tensor:
        """Returns [G,S,M]: each token's gate-weighted sum of its experts' outputs, in x's dtype.

        Args:
          routing: the experts of each token and their gates.
          x_GSM: the tokens.
          experts: the experts.
          theta: the experts' weights.
          exchange: moves rows between the devices of the groups and those of the experts.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no run")
