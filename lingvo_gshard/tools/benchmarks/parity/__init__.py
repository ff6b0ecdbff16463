"""gshard-bench parity: published models here and in transformers, compared."""
