"""Services that get the rows of metrics.jsonl as well: Weights & Biases, and MLflow."""
