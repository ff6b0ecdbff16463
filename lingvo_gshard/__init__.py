"""GShard for TensorFlow: giant Transformers written as if for one device."""

__version__ = "0.1.0"
__all__ = ["partition", "plan"]


def __getattr__(name: str) -> object:
    """What is imported on first use: importing the package alone brings no TensorFlow."""
    if name == "partition":
        from lingvo_gshard.runtime.partition import partition

        return partition
    if name == "plan":
        from lingvo_gshard.planning.planner import plan

        return plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
