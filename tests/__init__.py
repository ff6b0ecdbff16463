"""Tests. The folders mirror those of the package."""
