"""Earlier versions: their names of modules, classes and options in the Params of runs."""
