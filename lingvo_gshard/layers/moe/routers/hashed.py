"""Hash: a token's experts depend on its id alone (Roller et al. 2021, arXiv 2106.04426)."""

import tensorflow as tf

from lingvo_gshard.core import context, random_numbers
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.layer import layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.layers.moe import choosing
from lingvo_gshard.layers.moe.places import Pick
from lingvo_gshard.layers.moe.router import TokenChoiceRouter
from lingvo_gshard.layers.moe.routing import Routing


class HashRouter(TokenChoiceRouter):
    """Sends a token to the k experts that a hash of its id says, each with gate 1/k.

    The paper's random hash (section 3): nothing is learned and no loss is needed, ids are spread
    evenly, and loads are as uneven as ids are frequent. Each layer, by its path, and each
    seed has a hash of its own. Of (id, expert) pairs every one has a random score, and the k
    largest win (Thaler and Ravishankar 1998, "Using name-based mappings to increase hit rates"): k
    different experts, and any number of them.
    """

    needs_token_ids = True

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("k", 1, "How many experts a token gets.")
        p.define("seed", 0, "Another seed, another assignment.")
        return p

    def __init__(self, params: Params, path: str = ""):
        super().__init__(params, path)
        self.check_range("k", 1)
        self.check_range("seed", 0, 2**31 - 1)

    @layer_method
    def fprop(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        mask_GS: tf.Tensor,
        ids_GS: tf.Tensor | None = None,
    ) -> Routing:
        """Returns the Routing of tokens of int32 ids; where the float32 mask is 0 they go nowhere.

        Raises ValueError without ids.
        """
        if ids_GS is None:
            raise ValueError(f"{self.path}: HashRouter routes by token ids, and none were given")
        gate_GS = tf.fill(ids_GS.shape, 1.0 / self.p.k)
        picks = [
            Pick(expert_GS, gate_GS, mask_GS, mask_GS)
            for expert_GS, _ in choosing.best_few(self._scores(ids_GS), self.p.k)
        ]
        return self.route(picks, self.capacity(x_GSM.shape[1]))

    def _scores(self, ids_GS: tf.Tensor) -> tf.Tensor:
        """A number for each token and expert [G,S,E], of 24 bits, which float32 holds exactly."""
        p, iteration = self.p, context.current().iteration
        word = iteration.word(self.path) if iteration else random_numbers.word(self.path)
        key = random_numbers.hashed_fold_in_word(tf.constant([p.seed, 0]), word)
        pairs_GSE = ids_GS[..., None] * p.num_experts + tf.range(p.num_experts)
        words_GSE = random_numbers.hashed(pairs_GSE, key)
        return tf.cast(tf.bitwise.right_shift(words_GSE, tf.constant(8, tf.uint32)), tf.float32)
