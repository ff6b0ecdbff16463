# tests: sharding/paper_api.py
"""Tests the communication of compiled operators against Table 4 of GShard (arXiv:2006.16668).

A dimension of size O(D) is partitioned over D devices. Compiled for 8 devices, each row must use
exactly the collectives that the paper names, under both partitioners, and equal NumPy's
results. The paper allows an all-gather or a collective-permute for products of two operands that
are both partitioned; XLA on CPU uses the former. Further cases are the inverses of rows and the
changes of layout in the paper's section 3.3.
"""

import numpy as np
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.sharding.paper_api import replicate, split
from lingvo_gshard.sharding.partitioning import current_partitioning
from lingvo_gshard.wings.functions.partition import partition
from tests.sharding.compiled import PARTITIONERS

NONE = {}
AR = {"all-reduce": 1}
AG = {"all-gather": 1}
AA = {"all-to-all": 1}
CP = {"collective-permute": 2}


def _on(tensor: tf.Tensor, dimension: int) -> tf.Tensor:
    return split(tensor, dimension, current_partitioning().mesh.size)


def _product(equation: str, *operands: tf.Tensor) -> tf.Tensor:
    return tf.einsum(equation, *operands)


# Name: the operator with its annotations, its NumPy reference, the operands' shapes on D
# devices, and the allowed collectives. The operators' letters are the paper's.
ROWS = {
    "add A,A->A on A": (
        lambda x, y: _on(_on(x, 0) + _on(y, 0), 0),
        lambda x, y: x + y,
        lambda D: [(2 * D,), (2 * D,)],
        NONE,
    ),
    "matmul AB,BC->AC on B": (
        lambda x, y: replicate(_product("AB,BC->AC", _on(x, 1), _on(y, 0))),
        lambda x, y: x @ y,
        lambda D: [(3, 2 * D), (2 * D, 5)],
        AR,
    ),
    "matmul AB,BC->AC on A": (
        lambda x, y: _on(_product("AB,BC->AC", _on(x, 0), replicate(y)), 0),
        lambda x, y: x @ y,
        lambda D: [(2 * D, 3), (3, 5)],
        NONE,
    ),
    "matmul AB,BC->AC on A and B": (
        lambda x, y: _on(_product("AB,BC->AC", _on(x, 0), _on(y, 0)), 0),
        lambda x, y: x @ y,
        lambda D: [(2 * D, 2 * D), (2 * D, 5)],
        AG,
    ),
    "matmul AB,BC->AC on A and C": (
        lambda x, y: _on(_product("AB,BC->AC", _on(x, 0), _on(y, 1)), 0),
        lambda x, y: x @ y,
        lambda D: [(2 * D, 3), (3, 2 * D)],
        AG,
    ),
    "reduce AB->A on A": (
        lambda x: _on(tf.reduce_sum(_on(x, 0), 1), 0),
        lambda x: x.sum(1),
        lambda D: [(2 * D, 3)],
        NONE,
    ),
    "reduce AB->B on A": (
        lambda x: replicate(tf.reduce_sum(_on(x, 0), 0)),
        lambda x: x.sum(0),
        lambda D: [(2 * D, 3)],
        AR,
    ),
    "dispatch GSEC,GSM->EGCM on G, E": (
        lambda mask, x: _on(_product("GSEC,GSM->EGCM", _on(mask, 0), _on(x, 0)), 0),
        lambda mask, x: np.einsum("GSEC,GSM->EGCM", mask, x),
        lambda D: [(D, 4, D, 16 // D), (D, 4, 6)],
        AA,
    ),
    "convolution BIXY,xyIO->BOXY on X": (
        lambda x, kernel: _on(tf.nn.conv2d(_on(x, 1), replicate(kernel), 1, "SAME"), 1),
        lambda x, kernel: _convolution(x, kernel),
        lambda D: [(2, 4 * D, 5, 3), (3, 3, 3, 4)],
        CP,
    ),
}

BESIDE = {
    "combine GSEC,EGCM->GSM on E, G": (
        lambda mask, x: _on(_product("GSEC,EGCM->GSM", _on(mask, 0), _on(x, 0)), 0),
        lambda mask, x: np.einsum("GSEC,EGCM->GSM", mask, x),
        lambda D: [(D, 4, D, 16 // D), (D, D, 16 // D, 6)],
        AA,
    ),
    "experts EGCM,EMH->EGCH on E": (
        lambda x, w: _on(_product("EGCM,EMH->EGCH", _on(x, 0), _on(w, 0)), 0),
        lambda x, w: np.einsum("EGCM,EMH->EGCH", x, w),
        lambda D: [(D, 2, 3, 4), (D, 4, 5)],
        NONE,
    ),
    "convolution with a kernel of one on X": (
        lambda x, kernel: _on(tf.nn.conv2d(_on(x, 1), replicate(kernel), 1, "SAME"), 1),
        lambda x, kernel: x @ kernel[0, 0],
        lambda D: [(2, 4 * D, 5, 3), (1, 1, 3, 4)],
        NONE,
    ),
    "layout from one dimension to another": (
        lambda x: _on(tf.sin(_on(x, 0)), 1),
        np.sin,
        lambda D: [(2 * D, 2 * D)],
        AA,
    ),
    "layout from split to replicated": (
        lambda x: tf.cumsum(replicate(tf.sin(_on(x, 0)))),
        lambda x: np.sin(x).cumsum(0),
        lambda D: [(2 * D, 3)],
        AG,
    ),
    "layout from replicated to split": (
        lambda x: _on(tf.sin(replicate(x)), 0),
        np.sin,
        lambda D: [(2 * D, 3)],
        NONE,
    ),
    "layout from a sum's parts to split": (
        lambda x, y: _on(_product("AB,BC->AC", _on(x, 1), _on(y, 0)), 0),
        lambda x, y: x @ y,
        lambda D: [(2 * D, 2 * D), (2 * D, 5)],
        AR,
    ),
}


def _convolution(x: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Returns a 3x3 convolution with stride 1 and zero padding, computed by the definition."""
    padded = np.pad(x, [(0, 0), (1, 1), (1, 1), (0, 0)])
    rows, columns = x.shape[1:3]
    return sum(
        padded[:, i : i + rows, j : j + columns] @ kernel[i, j] for i in range(3) for j in range(3)
    )


class Table4Test(testing.TestCase, parameterized.TestCase):
    def check(self, row, partitioner: str) -> None:
        operator, reference, shapes, collectives = row
        rng = np.random.default_rng(0)
        operands = [rng.standard_normal(shape).astype(np.float32) for shape in shapes(8)]
        partitioned = partition(operator, "devices=8", partitioner=partitioner)
        self.assertCollectives(partitioned, *operands, expected=collectives)
        self.assertAllClose(partitioned(*operands), reference(*operands), rtol=1e-4, atol=1e-5)

    @parameterized.product(row=tuple(ROWS), partitioner=PARTITIONERS)
    def test_communication_equals_that_of_the_table(self, row, partitioner):
        self.check(ROWS[row], partitioner)

    @parameterized.parameters(*ROWS)
    def test_communication_grows_with_devices_as_in_the_table(self, row):
        """Doubles devices and partitioned dimensions. C of dispatch is O(1/D), as in the paper."""
        operator, _, shapes, collectives = ROWS[row]

        def moved(devices: int) -> int:
            specs = [tf.TensorSpec(shape) for shape in shapes(devices)]
            compiled = partition(operator, f"devices={devices}").compile(*specs)
            return sum(collective.bytes for collective in compiled.collectives())

        self.assertEqual(moved(8), moved(4) * (2 if collectives == AG else 1))

    @parameterized.product(row=tuple(BESIDE), partitioner=PARTITIONERS)
    def test_communication_of_inverses_and_layout_changes(self, row, partitioner):
        self.check(BESIDE[row], partitioner)


if __name__ == "__main__":
    testing.main()
