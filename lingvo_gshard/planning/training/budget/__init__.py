"""What to train for a sum of money: model size, experts, tokens and machine by scaling laws."""
