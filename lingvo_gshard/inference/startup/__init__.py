"""What a second start of a decoder needs, kept on disk: weights and compiled programs."""
