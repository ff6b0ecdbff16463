"""The common part of self-contained HTML pages: the page, tables, bars, tensors on a mesh."""
