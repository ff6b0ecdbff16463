"""Preparation of text, measured."""
