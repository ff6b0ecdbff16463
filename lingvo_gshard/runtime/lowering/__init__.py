"""From a TensorFlow function to a Program."""
