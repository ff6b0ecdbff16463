"""The machines that steps are planned for: chips, topologies, interconnects, compilers."""
