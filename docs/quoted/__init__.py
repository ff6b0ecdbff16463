"""Figures of plans in the sentences and tables of the pages, with the command behind each."""
