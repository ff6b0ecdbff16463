"""Evaluation of tasks: the scores of a trained model on a split of its data."""

from lingvo_gshard.tasks.evaluation.evaluation import (
    Evaluation,
    MeanMetrics,
    Table,
    WeightedMeans,
    perplexity,
)

__all__ = ["Evaluation", "MeanMetrics", "Table", "WeightedMeans", "perplexity"]
