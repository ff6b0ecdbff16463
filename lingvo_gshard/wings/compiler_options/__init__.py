"""Options of XLA's compilers that steps are compiled with by default."""
