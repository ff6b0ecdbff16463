"""A small SVG writer: a panel with its own background, readable on light and on dark pages."""

from __future__ import annotations

import html
from collections.abc import Mapping

# The colors of the planner's page, after Okabe and Ito: told apart by those who see colors
# otherwise. Each is (name, on light pages, on dark pages).
_COLORS = (
    ("paper", "#ffffff", "#15191d"),
    ("panel", "#f4f6f7", "#20262c"),
    ("ink", "#1c2126", "#e6e9ec"),
    ("muted", "#5c6670", "#a3adb6"),
    ("line", "#d5dadd", "#39424a"),
    ("c0", "#0072b2", "#3f9bdb"),
    ("c1", "#d98200", "#eda53a"),
    ("c2", "#0a8a69", "#35b993"),
    ("c3", "#b85f8f", "#d98bb4"),
)
_STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans",
  sans-serif; font-size: 13px; fill: var(--ink); }
.title { font-size: 19px; font-weight: 650; letter-spacing: -0.01em; }
.head { font-size: 14px; font-weight: 650; }
.muted { fill: var(--muted); }
.small { font-size: 12px; }
.code { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: 12px; }
.end { text-anchor: end; }
.middle { text-anchor: middle; }
.paper { fill: var(--paper); stroke: var(--line); }
.card { fill: var(--panel); }
.rule { stroke: var(--line); fill: none; }
.empty { fill: none; stroke: var(--muted); stroke-width: 1; stroke-dasharray: 2.5 2; }
.thin { stroke: var(--ink); stroke-width: 1; fill: none; }
"""
MARGIN = 28


class Picture:
    """A picture, to which elements are added in the order of drawing.

    The style of an element is classes of the style sheet above; further attributes of SVG are
    written with underscores, such as `stroke_width`.
    """

    def __init__(self, width: int, height: int, title: str, description: str):
        """Begins a picture.

        Args:
          width: in pixels.
          height: in pixels.
          title: the heading, which is drawn as well.
          description: what the picture shows, for those who cannot see it.
        """
        self.width, self.height = width, height
        self._title, self._description = title, description
        self._elements: list[str] = []
        self.text(MARGIN, 42, title, "title")

    def text(self, x: float, y: float, text: str, style: str = "", **attributes: str) -> None:
        """Adds a line of text that begins, ends (`end`) or is centered (`middle`) at x."""
        place = f'x="{_number(x)}" y="{_number(y)}"'
        self._elements.append(
            f"<text {place}{_styled(style, attributes)}>{html.escape(text)}</text>"
        )

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        style: str,
        radius: float = 3,
        **attributes: str,
    ) -> None:
        """Adds a rectangle with rounded corners."""
        box = f'x="{_number(x)}" y="{_number(y)}" width="{_number(width)}"'
        corners = f'height="{_number(height)}" rx="{_number(radius)}"'
        self._elements.append(f"<rect {box} {corners}{_styled(style, attributes)}/>")

    def polygon(self, points: list[tuple[float, float]], style: str, **attributes: str) -> None:
        """Adds a closed polygon."""
        text = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._elements.append(f'<polygon points="{text}"{_styled(style, attributes)}/>')

    def path(self, commands: str, style: str, **attributes: str) -> None:
        """Adds a path, given as SVG path commands."""
        self._elements.append(f'<path d="{commands}"{_styled(style, attributes)}/>')

    def line(self, points: list[tuple[float, float]], style: str, **attributes: str) -> None:
        """Adds an open line through points."""
        text = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._elements.append(f'<polyline points="{text}"{_styled(style, attributes)}/>')

    def to_text(self) -> str:
        """Returns the SVG file."""
        light = "".join(f" --{name}: {color};" for name, color, _ in _COLORS)
        dark = "".join(f" --{name}: {color};" for name, _, color in _COLORS)
        fills = "\n".join(
            f".c{n} {{ fill: var(--c{n}); }}\n.s{n} {{ stroke: var(--c{n}); fill: none; }}"
            for n in range(4)
        )
        size = f'width="{self.width}" height="{self.height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
                f'viewBox="0 0 {self.width} {self.height}" role="img" '
                'aria-labelledby="title description">',
                f'<title id="title">{html.escape(self._title)}</title>',
                f'<desc id="description">{html.escape(self._description)}</desc>',
                f"<style>\nsvg {{{light} }}\n@media (prefers-color-scheme: dark) "
                f"{{ svg {{{dark} }} }}{_STYLE}{fills}\n</style>",
                f'<rect class="paper" x="0.5" y="0.5" width="{self.width - 1}" '
                f'height="{self.height - 1}" rx="10"/>',
                *self._elements,
                "</svg>\n",
            ]
        )


def _styled(style: str, attributes: Mapping[str, str]) -> str:
    """Returns classes of the style sheet and other attributes, written as in `stroke_width`."""
    every = {"class": style, **attributes} if style else attributes
    return "".join(f' {name.replace("_", "-")}="{value}"' for name, value in every.items())


def _number(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")
