"""Prints constraints that make pip install the oldest versions that setup.py allows."""

import pathlib
import re

TEXT = pathlib.Path(__file__).parents[1].joinpath("setup.py").read_text(encoding="utf-8")
LISTED = re.search(r"install_requires=\[(.*?)\]", TEXT, re.DOTALL)
for requirement in re.findall(r'"(.+?)"', LISTED[1]):
    found = re.match(r"([\w.-]+)(?:>=|~=|==)([\d.]+)", requirement)
    if found:
        name, version = found.groups()
        print(f"{name}~={version}.0" if version.count(".") < 1 else f"{name}=={version}.*")
