"""What self-contained HTML pages share: the page itself, tables, bars, tensors on a mesh."""
