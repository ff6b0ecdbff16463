"""The benchmarks of gshard-bench."""
