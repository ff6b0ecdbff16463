"""Shares the trained runs of tests/tools."""

from tests.tools.conftest import language_model_logdir, trained_logdir

__all__ = ["language_model_logdir", "trained_logdir"]
