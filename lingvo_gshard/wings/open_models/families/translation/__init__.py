"""The families of published encoder-decoders."""
