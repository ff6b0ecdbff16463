"""Data sets of Hugging Face that training reads while it goes on, without preparation."""
