"""Training steps that fill a card: chosen by their plan, exported, and measured on the card."""
