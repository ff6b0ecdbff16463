"""Fine-tuning: adapters, preferences, and conversations from their files to packed batches."""
