"""GShard for TensorFlow: giant Transformers written as if for one device."""

__version__ = "0.1.0"
