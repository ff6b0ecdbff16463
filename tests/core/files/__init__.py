"""Tests of lingvo_gshard.core.files."""
