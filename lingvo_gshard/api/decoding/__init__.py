"""What a run decodes with, and what its precision costs."""
