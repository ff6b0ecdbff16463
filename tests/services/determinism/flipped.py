"""A device that computes one bit wrong, at one of its steps."""

import jax
import numpy as np

from lingvo_gshard.core.nested_map import NestedMap


def flipped(array, device=0):
    """Returns an array with one bit flipped in what one device holds of it."""
    if not isinstance(array, jax.Array):
        return _flip(array)
    shards = [
        jax.device_put(_flip(np.array(shard.data)) if k == device else shard.data, shard.device)
        for k, shard in enumerate(array.addressable_shards)
    ]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def _flip(values):
    values = np.array(values)
    values.reshape(-1).view(np.uint8)[5] ^= 4
    return values


class FlippingRuntime:
    """A runtime whose call number `call` of train_step ends with a flipped bit in a weight."""

    def __init__(self, runtime, path, device, call):
        self._runtime = runtime
        self._path, self._device, self._calls_left = path, device, call

    def __getattr__(self, name):
        return getattr(self._runtime, name)

    def train_step(self, batch):
        metrics = self._runtime.train_step(batch)
        self._calls_left -= 1
        if not self._calls_left:
            state = NestedMap(self._runtime.state())
            items = dict(state.flatten_items())
            items[self._path] = flipped(items[self._path], self._device)
            self._runtime.load_state(state.pack(items.values()))
        return metrics
