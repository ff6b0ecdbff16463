"""gshard-doctor: checks of an installation and its machine, one file for each kind."""
