"""Heat map of experts by language, as one HTML file."""

from __future__ import annotations

import base64
import hashlib
import html

_CELL, _GAP, _HEAD = 26, 2, 20
# With more experts than this the squares are too small for numbers.
_MOST_WITH_NUMBERS = 32
_SMALL_CELL = 8
# Numbers on squares at least this strong are written in the color for dark squares.
_DARK = 0.55

_STYLE = """
:root { --paper: #fbfbf9; --panel: #ffffff; --ink: #1c2126; --muted: #5c6670; --line: #e2e5e8;
  --accent: #0068a6; --on-accent: #ffffff; }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #121518; --panel: #191d21; --ink: #e6e9ec; --muted: #98a3ad; --line: #2c3238;
    --accent: #6cb8ec; --on-accent: #0d1216; }
}
html { color-scheme: light dark; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 1200px; margin: 0 auto; padding: 48px 32px 96px; }
h1 { font-size: 28px; margin: 0; }
h2 { font-size: 17px; margin: 40px 0 4px; overflow-wrap: anywhere; }
p { margin: 0 0 12px; color: var(--muted); }
.scroll { overflow-x: auto; padding: 14px; background: var(--panel); border: 1px solid var(--line);
  border-radius: 8px; }
svg { display: block; font-size: 12px; font-variant-numeric: tabular-nums; }
text { fill: var(--ink); }
.expert { fill: var(--muted); text-anchor: middle; }
.language { text-anchor: end; }
.share { text-anchor: middle; font-size: 10.5px; }
.dark { fill: var(--on-accent); }
.cell { fill: var(--accent); }
.frame { fill: none; stroke: var(--line); }
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p>{about}</p>
{layers}
</main>
</body>
</html>
"""

_ABOUT = (
    "Step {step:,}, {rows:,} rows of {split}. Each square shows an expert's share of a language's "
    "tokens, in percent. The darkest square is the largest share of the layer. With even loads "
    "every square would show {even}."
)


def to_html(record: dict) -> str:
    """Returns the HTML page of a report.

    Args:
      record: the report, as `gshard-experts report --json` writes it.
    """
    sizes = sorted({layer["num_experts"] for layer in record["layers"]})
    even = " or ".join(f"{100 / size:.3g}" for size in sizes)
    about = _ABOUT.format(**{name: record[name] for name in ("step", "rows", "split")}, even=even)
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    return _PAGE.format(
        policy=f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'",
        title=html.escape(f"Experts of {record['experiment']}"),
        style=_STYLE,
        about=html.escape(about),
        layers="\n".join(_section(layer) for layer in record["layers"]),
    )


def _section(layer: dict) -> str:
    found = layer["all"]
    facts = (
        f"{layer['num_experts']} experts, largest violation {found['largest_violation']:.2f}, "
        f"{found['dropped_share']:.1%} dropped, {found['dead_experts']} dead; languages differ by "
        f"{layer['languages_differ']:.1%} of their tokens"
    )
    return (
        f"<section>\n<h2>{html.escape(layer['path'])}</h2>\n<p>{facts}</p>\n"
        f'<div class="scroll">{_map(layer)}</div>\n</section>'
    )


def _map(layer: dict) -> str:
    """Returns the squares of one layer as SVG."""
    count = layer["num_experts"]
    with_numbers = count <= _MOST_WITH_NUMBERS
    cell = _CELL if with_numbers else _SMALL_CELL
    shares = {
        language: [load / max(sum(found["load"]), 1.0) for load in found["load"]]
        for language, found in layer["languages"].items()
    }
    largest = max(max(row) for row in shares.values()) or 1.0
    left = 12 + 8 * max(len(language) for language in shares)
    # At most so many numbers of experts that each has room.
    every = 1 if with_numbers else -(-_CELL // cell)
    parts = [
        f'<text class="expert" x="{left + (e + 0.5) * cell:g}" y="14">{e}</text>'
        for e in range(0, count, every)
    ]
    for index, (language, row) in enumerate(shares.items()):
        top = _HEAD + index * _CELL
        name = html.escape(language)
        parts.append(f'<text class="language" x="{left - 6}" y="{top + 17}">{name}</text>')
        for expert, share in enumerate(row):
            title = f"<title>{name}, expert {expert}: {share:.1%}</title>"
            square = _square(left + expert * cell, top, cell - _GAP, share, largest, with_numbers)
            parts.append(f"<g>{title}{square}</g>")
    width, height = left + count * cell, _HEAD + len(shares) * _CELL
    label = html.escape(f"Share of tokens by language and expert of {layer['path']}")
    return (
        f'<svg role="img" aria-label="{label}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">{"".join(parts)}</svg>'
    )


def _square(x: int, y: int, width: int, share: float, largest: float, with_number: bool) -> str:
    at = f'x="{x}" y="{y}" width="{width}" height="{_CELL - _GAP}"'
    strength = share / largest
    square = f'<rect class="cell" {at} fill-opacity="{strength:.3f}"/><rect class="frame" {at}/>'
    if not with_number:
        return square
    dark = " dark" if strength > _DARK else ""
    place = f'x="{x + width / 2:g}" y="{y + 16}"'
    return f'{square}<text class="share{dark}" {place}>{100 * share:.0f}</text>'
