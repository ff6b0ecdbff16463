"""Runs a command: `python -m lingvo_gshard train` does the same as `gshard-train`."""

from lingvo_gshard.tools.console import launcher

if __name__ == "__main__":
    launcher.run_module()
