"""Steps that are computed twice, or replayed, and compared in every bit."""
