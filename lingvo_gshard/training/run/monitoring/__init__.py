"""What a run shows and records while it trains: metrics, progress, compilations, diagnosis."""
