"""Evaluation: chrF and BLEU of translations, and the likelihood of texts."""
