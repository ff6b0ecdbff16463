"""The worth of experts at equal FLOPs per token."""
