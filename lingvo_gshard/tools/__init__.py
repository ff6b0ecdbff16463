"""The commands: gshard-train is train.py, and so on. Folders hold the parts of larger commands."""
