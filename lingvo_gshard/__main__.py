"""Runs a command: `python -m lingvo_gshard train` does the same as `gshard-train`."""

from lingvo_gshard.tools.console import entry

if __name__ == "__main__":
    entry.run_module()
