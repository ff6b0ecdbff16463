"""Reads the elements of an HTML page, and the data that its script draws."""

import html.parser
import json


class Elements(html.parser.HTMLParser):
    """Collects every element with its attributes and the content of scripts and styles."""

    def __init__(self, page):
        super().__init__()
        self.found = []
        self.inside = False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.found.append([tag, dict(attrs), ""])
        self.inside = True

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.found[-1][2] += data

    def all(self, tag):
        return [(attributes, text) for name, attributes, text in self.found if name == tag]


def embedded(page):
    """Returns the data that the page's own script reads."""
    ((_, text),) = [one for one in Elements(page).all("script") if one[0].get("id") == "data"]
    return json.loads(text)
