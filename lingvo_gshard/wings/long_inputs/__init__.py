"""Long rows and large vocabularies: attention in blocks and rings, losses in chunks."""
