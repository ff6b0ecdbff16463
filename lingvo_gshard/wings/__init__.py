"""Features and products that stand on the library, which knows none of them."""
