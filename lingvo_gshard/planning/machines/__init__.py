"""Machines by name: chips, topologies, interconnects and their compilers."""
