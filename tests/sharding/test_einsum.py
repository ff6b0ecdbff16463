"""Compares einsum with NumPy and its gradients with TensorFlow, and tests its errors."""

import pathlib
import re

import hypothesis
import hypothesis.strategies as st
import numpy as np
import tensorflow as tf
from absl.testing import parameterized

import lingvo_gshard
from lingvo_gshard import testing
from lingvo_gshard.core.autodiff.remat_policy import SavedProducts
from lingvo_gshard.core.autodiff.remat_unit import restoring, saving
from lingvo_gshard.core.letters import LETTERS
from lingvo_gshard.sharding import einsum
from lingvo_gshard.testing.layers import assert_close

SIZES = {letter: 2 + index % 4 for index, letter in enumerate(LETTERS)}


def equations_in_use() -> list[str]:
    """Returns the equations that occur in the package."""
    sources = pathlib.Path(lingvo_gshard.__file__).parent.rglob("*.py")
    calls = re.compile(r"\"([A-Z]+,[A-Z]+->[A-Z]+)\"")
    return sorted({e for s in sources for e in calls.findall(s.read_text(encoding="utf-8"))})


def operands(equation: str, seed: int = 1) -> list[tf.Tensor]:
    rng = np.random.default_rng(seed)
    layouts = equation.partition("->")[0].split(",")
    shapes = [[SIZES[letter] for letter in layout] for layout in layouts]
    return [tf.constant(rng.normal(size=shape), tf.float32) for shape in shapes]


def value_and_gradients(function, equation: str) -> tuple[tf.Tensor, list[tf.Tensor]]:
    inputs = operands(equation)
    with tf.GradientTape() as tape:
        tape.watch(inputs)
        value = function(equation, *inputs)
        rng = np.random.default_rng(2)
        total = tf.reduce_sum(value * rng.normal(size=value.shape).astype(np.float32))
    return value, tape.gradient(total, inputs)


@st.composite
def equations(draw) -> str:
    """Draws equations of two operands with up to four letters, in any order."""
    letters = draw(st.permutations(list(LETTERS)))[:5]
    some = st.lists(st.sampled_from(letters), min_size=1, max_size=4, unique=True)
    left, right = draw(some), draw(some)
    output = draw(st.permutations(sorted({*left, *right})))
    output = output[: draw(st.integers(0, len(output)))]
    return f"{''.join(left)},{''.join(right)}->{''.join(output)}"


class EinsumTest(testing.TestCase, parameterized.TestCase):
    def check(self, equation: str) -> None:
        value, gradients = value_and_gradients(einsum, equation)
        exact = [x.numpy().astype(np.float64) for x in operands(equation)]
        assert_close(value, np.einsum(equation, *exact), "float32")
        _, expected = value_and_gradients(tf.einsum, equation)
        for gradient, one in zip(gradients, expected, strict=True):
            self.assertEqual(gradient.dtype, one.dtype)
            assert_close(gradient, one, "order")

    def test_equations_of_the_package_are_collected(self):
        self.assertContainsSubset(
            {"BLM,MH->BLH", "EGCM,EMH->EGCH", "EUGCM,EUMH->EUGCH"}, equations_in_use()
        )

    @parameterized.parameters(*equations_in_use())
    def test_equations_of_the_package_match_numpy(self, equation):
        self.check(equation)

    @hypothesis.settings(deadline=None)
    @hypothesis.given(equations())
    @hypothesis.example("BLM,M->BL")
    @hypothesis.example("MBL,BLH->MH")
    @hypothesis.example("BLM,BLM->BLM")
    @hypothesis.example("B,L->BL")
    def test_random_equations_match_numpy(self, equation):
        self.check(equation)

    def test_gradients_of_large_left_operands_match_tensorflow(self):
        equation = "BLM,MH->BLH"
        for sizes in ({"B": 9, "H": 2}, {"B": 2, "H": 9}):
            before = dict(SIZES)
            SIZES.update(sizes)
            try:
                self.check(equation)
            finally:
                SIZES.update(before)

    def test_accepts_one_and_three_operands(self):
        for equation in ("BLM->MB", "BL,LM,MH->BH"):
            exact = [x.numpy().astype(np.float64) for x in operands(equation)]
            actual = einsum(equation, *operands(equation))
            assert_close(actual, np.einsum(equation, *exact), "float32")

    def test_compiles_and_keeps_bfloat16(self):
        inputs = [tf.cast(x, tf.bfloat16) for x in operands("BLM,MH->BLH")]
        compiled = tf.function(lambda x, y: einsum("BLM,MH->BLH", x, y), jit_compile=True)
        self.assertEqual(compiled(*inputs).dtype, tf.bfloat16)

    @parameterized.parameters(
        ("BXM,MH->BXH", [(1, 1, 1), (1, 1)], "'X' names no dimension"),
        ("BLM,MH->BLH", [(1, 1), (1, 1)], "'BLM' has 3 letters for a tensor of rank 2"),
        ("BLM,MH->BLH", [(1, 1, 1)], "takes 2 operands, not 1"),
        ("BBM,MH->BH", [(1, 1, 1), (1, 1)], "'BBM' repeats the letter 'B'"),
        ("BLM,MH->BLV", [(1, 1, 1), (1, 1)], "'V' is in no operand"),
        ("BLM,MH", [(1, 1, 1), (1, 1)], "no '->'"),
        ("BLM,MH->BLH", [(1, 1, 2), (3, 1)], "'M' has sizes 2 and 3"),
    )
    def test_errors_name_the_equation(self, equation, shapes, message):
        with self.assertRaisesRegex(ValueError, message):
            einsum(equation, *(tf.ones(shape) for shape in shapes))

    def test_a_saved_product_is_restored(self):
        x, w = tf.random.stateless_normal([2, 3, 4], [1, 2]), tf.ones([4, 5])
        saved = SavedProducts("products")
        with saving(saved):
            first = einsum("BLM,MH->BLH", x, w)
        (result,) = saved.results
        with restoring(saved, [result + 1]):
            again = einsum("BLM,MH->BLH", x, w)
        self.assertAllEqual(again, first + 1)


if __name__ == "__main__":
    testing.main()
