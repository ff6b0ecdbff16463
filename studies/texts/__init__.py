"""The worth of experts in language models at equal FLOPs per token."""
