"""Tests annotate: the identity without a mesh, and the sharding in StableHLO with one."""

import re

import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import initializers
from lingvo_gshard.core.layer import Layer, layer_method
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding import annotate, annotate_like, annotate_weights, einsum
from lingvo_gshard.sharding.partitioning import Partitioning, use_partitioning

SHARDING = re.compile(r'@Sharding.*?mhlo\.sharding = "\{(.*?)\}"')

EXPERT_TENSOR = Partitioning.make("data=2,model=2", "expert_tensor")


def shardings(function, partitioning: Partitioning, *shapes: tuple[int, ...]) -> list[str]:
    """Returns the shardings in a function's StableHLO, in order."""
    compiled = tf.function(function, jit_compile=True, autograph=False)
    with use_partitioning(partitioning):
        lower = compiled.experimental_get_compiler_ir(*(tf.TensorSpec(s) for s in shapes))
        return SHARDING.findall(lower(stage="stablehlo"))


class AnnotateTest(testing.TestCase, parameterized.TestCase):
    def test_is_the_identity_without_a_mesh(self):
        x = tf.ones([2, 3])
        self.assertIs(annotate(x, "BL"), x)
        with use_partitioning(Partitioning.make("data=1,model=1", "expert_tensor")):
            self.assertIs(annotate(x, "BL"), x)

    def test_is_the_identity_in_eager_mode(self):
        x = tf.ones([2, 3])
        with use_partitioning(EXPERT_TENSOR):
            self.assertIs(annotate(x, "BL"), x)
            self.assertEqual(einsum("BL,BL->B", x, x).shape, [2])

    @parameterized.parameters(
        ("BLM", "activations", "devices=[2,1,1,2]0,1,2,3 last_tile_dim_replicate"),
        ("LBH", "activations", "devices=[1,2,2]0,1,2,3"),
        ("HLB", "activations", "devices=[2,1,2]0,2,1,3"),
        ("EGH", "activations", "devices=[2,1,2]0,1,2,3"),
        ("GEM", "activations", "devices=[2,1,1,2]0,1,2,3 last_tile_dim_replicate"),
        ("LMD", "activations", "replicated"),
        ("LMV", "weights", "devices=[1,1,2,2]0,2,1,3 last_tile_dim_replicate"),
        ("BMD", "weights", "replicated"),
    )
    def test_the_sharding_equals_the_layout(self, layout, kind, stated):
        got = shardings(lambda x: annotate(x, layout, kind) * 2, EXPERT_TENSOR, (4, 4, 4))
        self.assertEqual(got, [stated])

    def test_dimensions_split_over_two_axes_and_unsplit_letters(self):
        both = Partitioning.make("data=2,model=2", "B,M->data,model")
        self.assertEqual(
            shardings(lambda x: annotate(x, "BL"), both, (4, 4)), ["devices=[4,1]0,1,2,3"]
        )
        unsplit_shardings = shardings(lambda x: annotate(x, "BL", unsplit="BM"), both, (4, 4))
        self.assertEqual(unsplit_shardings, ["replicated"])
        mine = Partitioning.make("data=2,model=2", "moments: M->model,data")
        (stated,) = shardings(lambda x: annotate(x, "M", "moments"), mine, (4,))
        self.assertEqual(stated, "devices=[4]0,2,1,3")

    def test_moments_that_are_stored_whole_are_updated_whole(self):
        """Avoids gathering each moment after the update in order to store it."""
        mesh = "data=4"
        by_size = {
            size: shardings(
                lambda x: (annotate(x, "M", "moments"), annotate(x, "M", "weights")),
                Partitioning.make(mesh, "weights: M->data | moments: M->data"),
                (size,),
            )
            for size in (6, 8)
        }
        split = "devices=[4]0,1,2,3"
        self.assertEqual(by_size, {6: ["replicated", split], 8: [split, split]})

    def test_einsum_annotates_its_result(self):
        got = shardings(lambda x, w: einsum("BLM,MH->BLH", x, w), EXPERT_TENSOR, (4, 2, 4), (4, 4))
        self.assertEqual(got, ["devices=[2,1,2]0,1,2,3"])

    def test_gradients_have_the_sharding_of_their_tensors(self):
        def gradient(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = tf.reduce_sum(annotate(x, "LBH") ** 2)
            return tape.gradient(y, x)

        got = shardings(gradient, EXPERT_TENSOR, (4, 4, 4))
        self.assertEqual(got, ["devices=[1,2,2]0,1,2,3"] * 2)


class Dense(Layer):
    """Computes x w and annotates the result."""

    def __init__(self, params, path=""):
        super().__init__(params, path)
        sizes = {"M": 4, "H": 4}
        self.create_variable("w", "MH", sizes, initializers.constant(1.0), unsplit="M")

    @layer_method
    def fprop(self, theta, x_BM):
        return einsum("BM,MH->BH", x_BM, theta.w)

    @layer_method
    def mistaken(self, theta, x_BM):
        return annotate(x_BM, "BMH")


class LayersTest(testing.TestCase):
    def test_overrides_of_the_current_layer_apply(self):
        partitioning = Partitioning.make("data=2,model=2", "tensor", {"one": "H->none"})
        layers = [Dense(Dense.params(), path) for path in ("one", "other")]

        def both(x):
            return [layer.fprop(layer.init(1), x) for layer in layers]

        split = "devices=[1,2,2]0,2,1,3 last_tile_dim_replicate"
        self.assertEqual(shardings(both, partitioning, (4, 4)), ["replicated", split])

    def test_weights_and_moments_are_annotated_by_their_specs(self):
        spec = Dense(Dense.params(), "one").variable_specs().w
        partitioning = Partitioning.make("data=2,model=2", "zero1_tensor", {"other": "H->none"})

        def weight_and_moment(x):
            return annotate_like(x, spec), annotate_like(x, spec, "moments")

        split = "devices=[1,2,2]0,2,1,3 last_tile_dim_replicate"
        self.assertEqual(shardings(weight_and_moment, partitioning, (4, 4)), [split, split])
        self.assertIs(annotate_like(x := tf.ones([4, 4]), spec), x)

    def test_trees_of_weights_are_annotated_by_their_specs(self):
        specs = Dense(Dense.params(), "one").variable_specs()
        partitioning = Partitioning.make("data=2,model=2", "weights: H->model | moments: H->data")

        def weights_and_moments(x):
            theta = NestedMap(w=x)
            return annotate_weights(theta, specs).w, annotate_weights(theta, specs, "moments").w

        def one_by_one(x):
            return annotate_like(x, specs.w), annotate_like(x, specs.w, "moments")

        found = shardings(weights_and_moments, partitioning, (4, 4))
        self.assertEqual(found, shardings(one_by_one, partitioning, (4, 4)))
        self.assertEqual(len(set(found)), 2)

    def test_a_wrong_rank_or_letter_raises_with_the_layer_name(self):
        with self.assertRaisesRegex(
            ValueError, "^Layout 'BLM' has 3 letters for a tensor of rank 2"
        ):
            annotate(tf.ones([2, 3]), "BLM")
        with self.assertRaisesRegex(ValueError, "^Layout 'BX': 'X' names no dimension"):
            annotate(tf.ones([2, 3]), "BX")
        dense = Dense(Dense.params(), "encoder.dense")
        with self.assertRaisesRegex(ValueError, "^encoder.dense: Layout 'BMH' has 3 letters"):
            dense.mistaken(dense.init(1), tf.ones([2, 4]))


if __name__ == "__main__":
    testing.main()
