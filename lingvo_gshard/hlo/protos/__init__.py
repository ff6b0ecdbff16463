"""XLA's messages as this package reads them: compiled programs and traces, without TensorFlow."""
