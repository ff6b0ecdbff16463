"""Decoding with options and lines that make no sense."""

from tests.hard_knocks.case import Case
from tests.hard_knocks.prepare import trained

_TRANSLATE = "gshard-translate --logdir=run "
_GENERATE = "gshard-generate --logdir=run "
_RUN = (trained("run", "translation"),)
_WRITER = (trained("run", "language model"),)

CASES = (
    Case(
        "languages of a model of our own",
        _TRANSLATE + "--target_language=fr",
        given=_RUN,
        stdin=b"Hund\n",
        error="--target_language=fr applies to imported models for many languages; the run of ...",
    ),
    Case(
        "no beam",
        _TRANSLATE + "--beam_size=0",
        given=_RUN,
        stdin=b"Hund\n",
        error="--beam_size=0: 0 is not a positive integer",
    ),
    Case(
        "a negative beam",
        _TRANSLATE + "--beam_size=-4",
        given=_RUN,
        stdin=b"Hund\n",
        error="--beam_size=-4: -4 is not a positive integer",
    ),
    Case(
        "a negative coverage weight",
        _TRANSLATE + "--coverage_weight=-1",
        given=_RUN,
        stdin=b"Hund\n",
        error="--coverage_weight=-1: -1.0 is not a non-negative number",
    ),
    Case(
        "a length exponent that is NaN",
        _TRANSLATE + "--length_exponent=nan",
        given=_RUN,
        stdin=b"Hund\n",
        error="--length_exponent=nan; expected a finite number",
    ),
    Case(
        "an infinite length exponent",
        _TRANSLATE + "--length_exponent=inf",
        given=_RUN,
        stdin=b"Hund\n",
        error="--length_exponent=inf; expected a finite number",
    ),
    Case(
        "an empty stop string",
        _GENERATE + "--stop=. --stop=",
        given=_WRITER,
        stdin=b"the\n",
        error="stop[1] is empty, which every text contains; a text of 1 character or more was "
        "expected",
    ),
    Case(
        "drawing with a beam",
        _TRANSLATE + "--temperature=1",
        given=_RUN,
        stdin=b"Hund\n",
        error="temperature=1.0 draws tokens and beam_size=4 searches; set one of beam_size=1 and "
        "temperature=0",
    ),
    Case(
        "an allowed token that is no id",
        _TRANSLATE + "--allowed_tokens=5,x",
        given=_RUN,
        stdin=b"Hund\n",
        error="--allowed_tokens: 'x'; a whole number of 0 or more was expected",
    ),
    Case(
        "a forbidden token that no vocabulary has",
        _TRANSLATE + "--forbidden_tokens=99999",
        given=_RUN,
        stdin=b"Hund\n",
        error="forbidden_tokens has 99999; ids from 0 to ... were expected",
    ),
    Case(
        "a negative temperature",
        _GENERATE + "--temperature=-1",
        given=_WRITER,
        stdin=b"the\n",
        error="--temperature=-1: -1.0 is not a non-negative number",
    ),
    Case(
        "a temperature that is NaN",
        _GENERATE + "--temperature=nan",
        given=_WRITER,
        stdin=b"the\n",
        error="--temperature=nan; expected a finite number",
    ),
    Case(
        "a top_p above one",
        _GENERATE + "--top_p=1.5",
        given=_WRITER,
        stdin=b"the\n",
        error="--top_p=1.5: a number above 0 and of 1 at most was expected",
    ),
    Case(
        "a top_p of zero",
        _GENERATE + "--top_p=0",
        given=_WRITER,
        stdin=b"the\n",
        error="--top_p=0.0: a number above 0 and of 1 at most was expected",
    ),
    Case(
        "a negative top_k",
        _GENERATE + "--top_k=-1",
        given=_WRITER,
        stdin=b"the\n",
        error="--top_k=-1: -1 is not a non-negative integer",
    ),
    Case(
        "drawing a text with a beam",
        _GENERATE + "--beam_size=4",
        given=_WRITER,
        stdin=b"the\n",
        error="temperature=1.0 draws tokens and beam_size=4 searches; set one of beam_size=1 and "
        "temperature=0",
    ),
    Case(
        "streaming several texts",
        _GENERATE + "--stream --best=2",
        given=_WRITER,
        stdin=b"the\n",
        error="--stream shows one text at a time: it needs --best=1 and --beam_size=1, and --json "
        "only with a file",
    ),
    Case(
        "lines from a file that does not exist",
        _TRANSLATE + "--input=lines.txt",
        given=_RUN,
        error="--input=lines.txt: No such file or directory",
    ),
    Case(
        "no token left to choose",
        _GENERATE + "--allowed_tokens=5 --forbidden_tokens=5 --least_tokens=3",
        given=_WRITER,
        stdin=b"the\n",
        error="allowed_tokens and forbidden_tokens leave no token besides the end, and "
        "least_tokens is 3",
    ),
    Case(
        "beams of an evaluation",
        "gshard-evaluate --logdir=run --beam_size=0",
        given=_RUN,
        error="--beam_size=0: 0 is not a positive integer",
    ),
)
