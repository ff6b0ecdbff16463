"""Transformer layers, stacks of them, and the executions of a stack."""
