"""Converts trained models into other models: sparse upcycling and expert pruning."""
