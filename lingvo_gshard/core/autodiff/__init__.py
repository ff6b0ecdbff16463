"""Gradients: saved tensors, rematerialization and custom gradients."""
