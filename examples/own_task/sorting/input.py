"""SortingInput: rows of random digits. Batch n depends only on the seed and on n."""

import numpy as np
import tensorflow as tf

from lingvo_gshard.data.input import Input

# Seeds of the splits that are evaluated, and their number of batches.
_SPLITS = {"dev": 1_000_001, "test": 1_000_002}
_BATCHES = 4


class SortingInput(Input):
    """Rows of digits and the same digits in order."""

    @classmethod
    def params(cls):
        p = super().params()
        p.define("batch_rows", 32, "B: rows of a batch.")
        p.define("length", 16, "L: digits of a row.")
        return p

    @classmethod
    def batch_specs(cls, params):
        digits = tf.TensorSpec((params.batch_rows, params.length), tf.int32)
        return {"ids": digits, "sorted": digits, "positions": digits}

    @property
    def splits(self):
        return ("train", *_SPLITS)

    def train_batches(self, seed):
        return TrainBatches(self, seed)

    def evaluation_batches(self, split):
        for number in range(_BATCHES):
            yield self.make_batch(_SPLITS[split], number)

    def make_batch(self, seed, number):
        """Returns one batch."""
        shape = self.p.batch_rows, self.p.length
        ids = np.random.default_rng((seed, number)).integers(10, size=shape).astype(np.int32)
        positions = np.broadcast_to(np.arange(self.p.length, dtype=np.int32), shape)
        return {"ids": ids, "sorted": np.sort(ids, 1), "positions": positions}


class TrainBatches:
    """The training batches, whose position is one number."""

    def __init__(self, input_, seed):
        self._input, self._seed, self._number = input_, seed, 0

    def __next__(self):
        self._number += 1
        return self._input.make_batch(self._seed, self._number)

    def get_state(self):
        return {"number": self._number}

    def set_state(self, state):
        self._number = state["number"]

    def close(self):
        pass
