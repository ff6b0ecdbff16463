"""The public names of the foundation: Params, layers, contexts, files, progress, errors."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
