"""Texts on which tokenizers differ, listed and drawn: the same ones in every run."""

from __future__ import annotations

import numpy as np

# Emoji with joiners, skin tones and flags; marks that combine, in two orders; scripts without
# spaces, or from right to left; spaces of many widths; controls; letters whose case is special.
ATOMS = (
    *("😀", "👩\u200d👩\u200d👧\u200d👦", "👍🏽", "🇩🇪🇫🇷", "❤️", "☃", "𝔘𝔫𝔦", "𠜎"),
    *("e\u0301", "é", "a\u0308\u0323", "a\u0323\u0308", "क़", "क्षि", "ो", "\u0301", "ﬁ", "Ｆｕｌｌ"),
    *("لا يمكن", "مَرْحَبًا", "١٢٣", "שָׁלוֹם", "\u200fא\u200e", "ไม่สามารถ", "เปิดไฟล์", "ກຳ"),
    *("文件无法打开", "ファイルを", "파일을", "한\u1100\u1161", "、。", "　"),
    *(
        " ",
        "  ",
        "   ",
        "\t",
        "\n",
        "\r\n",
        "\n\n",
        "\u00a0",
        "\u2009",
        "\u200b",
        "\u2028",
        "\ufeff",
    ),
    *("\0", "\x01", "\x7f", "\x85", "\u00ad", "\u2060", "\ufffd", "\U0010fffd", "\ue000"),
    *("I'll", "don't", "WE'RE", "’s", "Straße", "ǅ", "İi", "ﬀ", "ſ", "Ω"),
    *("1", "12", "1234", "3.14", "1,000", "ⅷ", "²", "½", "0x1F", "2024-01-02"),
    *(
        "the",
        " file",
        "could",
        "HTTPServer",
        "camelCase",
        "snake_case",
        "C++",
        "a/b\\c",
        "http://x.y",
    ),
    *("...", "!?", "--", "——", "``", "''", "«»", "<s>x", "&amp;", "▁", "▁▁", "Ġ", "<0x0A>", "##x"),
)
# Repeated ones make texts and runs of spaces that are longer than any token.
_LONG = (
    "x" * 2000,
    " " * 500,
    "\n" * 300,
    "the file " * 300,
    "文" * 700,
    "😀" * 300,
    "e\u0301" * 300,
)


def texts(count: int = 200, seed: int = 0) -> list[str]:
    """Returns texts: each atom alone and between spaces, long ones, and atoms drawn together.

    Args:
      count: number of texts that are drawn.
      seed: draws others.
    """
    draw = np.random.default_rng(seed)
    found = ["", *ATOMS, *(f" {atom} " for atom in ATOMS), *_LONG]
    for _ in range(count):
        places = draw.integers(len(ATOMS), size=draw.integers(2, 12)).tolist()
        found.append(draw.choice(["", " "]).join(ATOMS[place] for place in places))
    return found
