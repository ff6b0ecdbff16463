"""Plans of rows, their order and their batches, made without reading the rows."""
