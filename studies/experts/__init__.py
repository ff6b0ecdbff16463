"""What experts are worth at equal FLOPs per token."""
