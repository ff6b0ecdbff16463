"""Which rows are trained on, in which order and in which batch, planned without reading them."""
