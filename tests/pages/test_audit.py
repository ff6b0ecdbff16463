# tests: /tests/pages/audit.py
"""Checks that the audit of pages finds what it looks for, and nothing else."""

import re

import pytest

from tests.pages import audit, browser

pytestmark = pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())

PAGE = """<!doctype html><meta name="viewport" content="width=device-width">
<body style="margin: 0; background: #fff; color: #000">
<p style="color: #999">faint</p>
<p style="color: #767676">at the limit</p>
<p style="color: #949494; font-size: 24px">large</p>
<div style="background: #000"><p style="color: rgba(255, 255, 255, .4)">half</p></div>
<div class="cut" style="width: 60px; overflow: hidden; white-space: nowrap">a long text</div>
<div style="width: 60px; overflow: auto; white-space: nowrap">a text that scrolls</div>
<select style="width: 60px"><option>short</option><option>a long choice</option></select>
<p style="display: none; color: #fff">hidden</p>
<div class="wide" style="width: 600px">wide</div>
"""


def test_side_scrolling_cut_text_and_faint_text_are_found(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(PAGE, encoding="utf-8")
    with browser.Browser(390, 844, phone=True) as opened:
        opened.open(path.as_uri())
        wide, *found = audit.problems(opened, 390)
    assert re.match(r"the page is 600 wide, the window 390: .*div\.wide", wide)
    assert found == [
        'p "faint" has a contrast of 2.85',
        'p "half" has a contrast of 3.66',
        'div.cut cuts "a long text"',
        'select cuts "a long choice"',
    ]
