"""Parts of layers that kernels of the hardware compute, on the shards of devices."""
