"""Imports gshard-train and its libraries: the fork server loads this module before it forks."""

from lingvo_gshard.runtime import standard_error

with standard_error.hide():
    import jax  # noqa: F401
    import orbax.checkpoint  # noqa: F401
    import tensorflow  # noqa: F401

    from lingvo_gshard.runtime import single_device, spmd  # noqa: F401
    from lingvo_gshard.tools import train  # noqa: F401
