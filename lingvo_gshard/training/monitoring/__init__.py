"""What a run reports: metrics, progress, expert loads, the cause of a bad loss."""
