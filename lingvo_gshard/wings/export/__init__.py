"""Export: writes trained models for programs that do not have this package."""
