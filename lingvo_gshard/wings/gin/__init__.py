"""Gin over Params: settings in files and on command lines, and Params written as settings."""
