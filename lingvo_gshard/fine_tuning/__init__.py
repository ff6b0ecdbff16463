"""Fine-tuning: conversations and preferences, from their files to packed batches."""
