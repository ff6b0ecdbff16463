"""TPU slices that a program runs on, and the transfers between them."""
