"""Families of DeepSeek's language models, and of models made of their parts."""
