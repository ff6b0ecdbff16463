"""A traced step as the search sees it."""
