"""Checks what all self-contained pages have in common."""

import importlib.resources
import re

import pytest

from lingvo_gshard.wings.pages import html_page
from tests.pages.elements import Elements, embedded

PACKAGES = (
    "lingvo_gshard.wings.pages",
    "lingvo_gshard.wings.planning.picture",
    "lingvo_gshard.wings.reporting.page",
    "lingvo_gshard.wings.serving.page",
)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_script_reads_text_as_html(package):
    scripts = [f for f in importlib.resources.files(package).iterdir() if f.name.endswith(".js")]
    assert scripts
    for file in scripts:
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert "</script" not in text and "<!--" not in text, file.name


def test_text_in_title_and_data_stays_text():
    text = "</script><script>alert(1)</script> {{SCRIPT}} <!-- & \u2028"
    page = html_page.make(text, [], [], {"name": text})
    found = Elements(page)
    assert [tag for tag, *_ in found.found].count("script") == 2
    assert embedded(page) == {"name": text}
    assert "<title>&lt;/script&gt;" in page
