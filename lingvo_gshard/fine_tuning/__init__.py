"""Fine-tuning: adapters of trained weights, and preferences between answers."""
