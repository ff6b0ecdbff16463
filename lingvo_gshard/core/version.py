"""The version of the package, which setup.py, records and messages read."""

VERSION = "0.1.0"
