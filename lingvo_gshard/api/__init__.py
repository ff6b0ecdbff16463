"""The public Python API; `lingvo_gshard` itself offers its names, see docs/python_api.md."""
