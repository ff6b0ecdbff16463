"""Reports on how tensors are sharded."""
