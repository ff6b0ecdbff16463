"""What gshard-inspect reads and prints."""
