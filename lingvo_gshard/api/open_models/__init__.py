"""Published models in the public API."""
