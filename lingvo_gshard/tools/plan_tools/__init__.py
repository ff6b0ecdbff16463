"""What gshard-plan prints."""
