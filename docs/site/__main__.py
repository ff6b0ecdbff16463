"""Writes the sources of the site, which `make docs` builds with mkdocs.

    python -m docs.site build/site_source

The pages of docs/ are copied; what they name of the reference becomes links. Tutorials are
notebooks, too. The reference is made of docstrings, flags and Params.
"""

from __future__ import annotations

import pathlib
import re
import shutil
import sys

from docs.site import code_links, notebooks, reference

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
# Files of the repository that are pages of the site: file -> page.
PAGES = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "README.md": "index.md",
}
# The page that has the README of each example, after the one of all.
EXAMPLES = "examples.md"
_LINK = re.compile(r"(\]\(|(?:src|srcset)=\")([^)\"#\s]+)(#[^)\"]*)?([)\"])")
# Folders of docs/ whose files pages show or link to.
_FOLDERS = ("pictures", "workflows")
_SUFFIXES = (".svg", ".png", ".yml")
_ASSETS = ("extra.css", "iframe-worker.js")
_NOTEBOOKS = "notebooks"


def write(target: pathlib.Path) -> None:
    """Writes all sources into a folder, which is emptied first."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for page in sorted(DOCS.glob("*.md")):
        write_page(target, page, page.name)
    for file, name in PAGES.items():
        write_page(target, ROOT / file, name)
    for folder in _FOLDERS:
        for file in sorted((DOCS / folder).iterdir()):
            if file.suffix in _SUFFIXES:
                (target / folder).mkdir(exist_ok=True)
                shutil.copy(file, target / folder / file.name)
    examples = ROOT / "examples"
    parts = [_placed(examples / "README.md", EXAMPLES)]
    parts += [f"#{_placed(page, EXAMPLES)}" for page in sorted(examples.glob("*/README.md"))]
    (target / EXAMPLES).write_text("\n".join(parts), encoding="utf-8")
    for name in _ASSETS:
        shutil.copy(DOCS / "site" / name, target)
    notebooks.write(target / _NOTEBOOKS)
    for name, text in reference.pages().items():
        file = target / "reference" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def write_page(target: pathlib.Path, page: pathlib.Path, name: str) -> None:
    """Copies a page, with links that fit its place on the site.

    Args:
      target: the folder of the sources.
      page: a file of the repository.
      name: the page's path on the site.
    """
    text = _placed(page, name)
    if page.parent == DOCS and page.name in notebooks.PAGES:
        text = _with_notebook(text, page.stem)
    file = target / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def _placed(page: pathlib.Path, name: str) -> str:
    """Returns a page's text, with links that fit its place on the site."""
    depth = name.count("/")

    def place(link: re.Match[str]) -> str:
        before, path, anchor, end = link.groups()
        if "://" in path or path.startswith("mailto:"):
            return link[0]
        found = (page.parent / path).resolve()
        own = _on_site(found)
        if own is None:
            # A file that is no page, such as a test: its name stays, without a link.
            return f"{before}{'../' * depth}index.md{end}" if before == "](" else link[0]
        return f"{before}{'../' * depth}{own}{anchor or ''}{end}"

    text = _LINK.sub(place, page.read_text(encoding="utf-8"))
    return code_links.with_links(text, "../" * depth)


def _with_notebook(text: str, stem: str) -> str:
    """Returns a tutorial with a link to its notebook, after the paragraph that opens it."""
    title, opening, rest = text.split("\n\n", 2)
    link = f"[Download this page as a notebook]({_NOTEBOOKS}/{stem}.ipynb)"
    return "\n\n".join([title, opening, f"{link}{{ .md-button download }}", rest])


def _on_site(file: pathlib.Path) -> str | None:
    """Returns the path on the site of a file of the repository; None if it is not there."""
    name = file.relative_to(ROOT).as_posix() if file.is_relative_to(ROOT) else ""
    if name in PAGES:
        return PAGES[name]
    if name.startswith("docs/"):
        return name.removeprefix("docs/")
    return EXAMPLES if name.startswith("examples/") else None


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
