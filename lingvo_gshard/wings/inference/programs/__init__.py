"""Programs of a decoder: their names, how they are lowered, and how they are compiled."""
