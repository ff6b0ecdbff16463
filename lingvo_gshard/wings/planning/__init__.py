"""Plans programs for machines that you do not have: memory, communication, time and cost."""
