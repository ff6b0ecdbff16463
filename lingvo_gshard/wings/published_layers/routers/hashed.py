"""Hash: a token's experts depend only on its id (Roller et al. 2021, arXiv 2106.04426)."""

from __future__ import annotations

from lingvo_gshard.core import (
    NestedMap,
    Params,
    UserError,
    context,
    layer_method,
    random_numbers,
    tf,
)
from lingvo_gshard.layers import Choice, Router, TokenCapacity, TokenChoiceRouting, selection


class HashRouter(Router):
    """Sends a token to the k experts given by a hash of its id, each with gate 1/k.

    The paper's random hash (section 3). Nothing is learned and no auxiliary loss is needed. Ids are
    spread evenly over experts, but loads are uneven because some ids are frequent. The hash depends
    on the layer's path and on the seed. It is rendezvous hashing (Thaler and Ravishankar 1998,
    "Using name-based mappings to increase hit rates"): each (id, expert) pair has a pseudo-random
    score and the k largest win, so that the k experts are different.
    """

    capacity = TokenCapacity()
    experts_per_token_option = "k"
    needs_token_ids = True

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("k", 1, "Number of experts per token.", minimum=1)
        p.define("seed", 0, "Seed of the hash.", minimum=0)
        return p

    @layer_method
    def fprop(
        self,
        theta: NestedMap,
        x_GSM: tf.Tensor,
        mask_GS: tf.Tensor,
        ids_GS: tf.Tensor | None = None,
    ) -> TokenChoiceRouting:
        """Returns the routing of a batch; see `Router.fprop`.

        Raises:
          UserError: `ids_GS` is None.
        """
        if ids_GS is None:
            raise UserError(f"{self.path}: HashRouter routes by token ids, but none were given")
        gate_GS = tf.fill(ids_GS.shape, 1.0 / self.p.k)
        choices = [
            Choice(expert_GS, gate_GS, mask_GS, mask_GS)
            for expert_GS, _ in selection.top_k(self._scores(ids_GS), self.p.k)
        ]
        return self.capacity.route(choices)

    def _scores(self, ids_GS: tf.Tensor) -> tf.Tensor:
        """Returns [G,S,E]: a 24-bit score for each token and expert, exact in float32."""
        p, iteration = self.p, context.current().iteration
        word = iteration.word(self.path) if iteration else random_numbers.word(self.path)
        key = random_numbers.hashed_fold_in_word(tf.constant([p.seed, 0]), word)
        pairs_GSE = ids_GS[..., None] * p.num_experts + tf.range(p.num_experts)
        words_GSE = random_numbers.hashed(pairs_GSE, key)
        return tf.cast(tf.bitwise.right_shift(words_GSE, tf.constant(8, tf.uint32)), tf.float32)
