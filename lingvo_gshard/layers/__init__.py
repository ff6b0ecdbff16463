"""The public names of the layers: attention, feed-forward, mixture of experts, stacks, losses."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
