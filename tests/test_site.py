# tests: /docs/site/, /mkdocs.yml
"""Tests the sources of the site: every page is in its navigation, and every link has a target."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import pytest

from docs.site import __main__ as site
from docs.site import reference
from tests.pages import audit, browser

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Pages that are opened in a browser.
_LOOKED_AT = (
    *("index", "first_eight_devices", "strategies", "errors", "reference/python"),
    *("reference/hyperparameters", "reference/commands", "reference/commands/train"),
)
# Pages in the menu, where readers look for an answer.
_MOST_ENTRIES = 45
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The sources of the site, with one page of the reference in place of those of commands."""
    folder = tmp_path_factory.mktemp("site") / "source"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "pages", lambda: {"letters.md": reference.letters_page()})
        site.write(folder)
    return folder


def test_the_navigation_has_every_page(sources):
    listed = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {path.relative_to(sources).as_posix() for path in sources.rglob("*.md")}
    assert {page for page in listed if not page.startswith("reference/")} == {
        page for page in pages if not page.startswith("reference/")
    }
    assert "reference/letters.md" in listed


def test_the_menu_is_short():
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    entries = re.findall(r"^ *- .+: .+\.md$", menu, re.MULTILINE)
    assert 0 < len(entries) <= _MOST_ENTRIES, (
        f"the menu of mkdocs.yml has {len(entries)} pages, at most {_MOST_ENTRIES} were "
        "expected: add a section to a page that is there, or join two pages"
    )


def test_links_of_pages_have_targets(sources):
    for page in sources.rglob("*.md"):
        for target in _LINK.findall(page.read_text(encoding="utf-8")):
            # tests/pages/test_reference.py tests links to the reference, which is not made here.
            is_own = "://" not in target and not re.match(r"mailto:|(\.\./)*reference/", target)
            if is_own:
                assert (page.parent / target).exists(), f"{page.relative_to(sources)}: {target}"


def test_one_page_has_every_example(sources):
    page = (sources / site.EXAMPLES).read_text(encoding="utf-8")
    titles = [file.read_text("utf-8").splitlines()[0] for file in ROOT.glob("examples/*/README.md")]
    assert len(titles) > 4 and all(f"\n#{title}\n" in page for title in titles)


def test_links_of_the_package_s_description_are_absolute():
    environment = {**os.environ, "PROJECT_URL": "https://example.org/us/gshard"}
    command = [sys.executable, "setup.py", "--quiet", "--long-description"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    links = re.findall(r"\]\(([^)]+)\)|\bsrc(?:set)?=\"([^\"]+)\"", ran.stdout)
    found = {page or picture for page, picture in links}
    assert all(link.startswith("https://") for link in found)
    own = {link for link in found if link.startswith("https://example.org/us/gshard/")}
    assert len(own) > 20
    for link in own:
        kind, _, path = re.sub(r"^https://example.org/us/gshard/", "", link).split("/", 2)
        assert kind == ("raw" if path.endswith((".png", ".svg")) else "blob")
        assert (ROOT / path.partition("#")[0]).exists()
    assert "git clone https://example.org/us/gshard lingvo_gshard" in ran.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mkdocs") is None, reason="mkdocs is not installed: make docs")
def test_the_site_is_built_without_a_network(tmp_path):
    subprocess.run([sys.executable, "-m", "docs.site", "build/site_source"], cwd=ROOT, check=True)
    build = ["mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True)
    if not browser.missing():
        for name in _LOOKED_AT:
            address = (tmp_path / f"{name}.html").as_uri()
            found = audit.problems_on_screens(lambda opened, page=address: opened.open(page))
            assert found == [], name
        assert "Errors" in _found_from_disk(tmp_path / "data.html", "RESOURCE_EXHAUSTED")
    loads = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="https?://')
    assert not any(loads.search(page.read_text("utf-8")) for page in tmp_path.rglob("*.html"))


def _found_from_disk(page: pathlib.Path, words: str) -> list[str]:
    """Returns the titles that the search of a page finds, opened from disk."""
    with browser.Browser() as opened:
        opened.open(page.as_uri())
        opened.click(".md-search__input")
        opened.type(".md-search__input", words)
        deadline = time.monotonic() + 60
        while not (titles := opened.texts(".md-search-result__item h1")):
            assert time.monotonic() < deadline, f"nothing is found of {words}"
            time.sleep(0.2)
        return titles
