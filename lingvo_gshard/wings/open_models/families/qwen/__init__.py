"""Families of Qwen's language models."""
