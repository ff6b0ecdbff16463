"""gshard-bench parity: compares published models here with the same models in transformers."""
