"""Plans a training for a sum of money: model size, experts, tokens and machine by scaling laws."""
