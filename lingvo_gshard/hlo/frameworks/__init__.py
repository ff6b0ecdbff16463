"""How frameworks other than TensorFlow name the operations of their programs."""
