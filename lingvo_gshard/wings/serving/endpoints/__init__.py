"""Endpoints: each answers the HTTP requests to one path."""
