"""Attention: kernels, masks and positions."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, ["multi_head_attention", "rotary"])
