"""Training of the quickstart's text, compared with other libraries."""
