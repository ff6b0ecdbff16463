"""Whether the machine computes right: steps computed twice, and steps that are replayed."""
