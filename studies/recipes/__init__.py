"""What precisions and optimizers do to quality."""
