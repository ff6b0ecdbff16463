"""Sharding: letters name the dimensions of tensors, and strategies split letters over mesh axes.

- `annotate` and `einsum` declare the letters of a tensor.
- `replicate`, `split`, `shard` and `mesh_split` are the annotations of the GShard paper.
- `manual` opens a region whose author moves the data between devices.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
