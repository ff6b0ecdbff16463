"""The public names of the tasks: models with loss, metrics and decoding."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
