"""From operations to the lines of code that made them."""
