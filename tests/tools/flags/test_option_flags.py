# tests: tools/flags/options.py, tools/flags/definitions.py, core/options.py
# tests: wings/serving/bodies.py
"""Tests that one declaration of an option makes its flag, its argument and its field of a body."""

import dataclasses
import json
import pathlib

import pytest
from absl import flags

from lingvo_gshard.core.options import OptionError, Options, declared, option
from lingvo_gshard.tools import evaluate, generate, translate
from lingvo_gshard.tools.console import startup
from lingvo_gshard.tools.flags.definitions import make_flags
from lingvo_gshard.tools.flags.options import given_options, option_flags, read_options
from lingvo_gshard.wings.inference.options import DRAWING, DecodingOptions
from lingvo_gshard.wings.serving.bodies import SearchBody, parse, with_options
from lingvo_gshard.wings.serving.endpoints.generate import GenerateBody
from lingvo_gshard.wings.serving.endpoints.translate import TranslateBody
from lingvo_gshard.wings.serving.errors import RequestError

ROOT = pathlib.Path(__file__).resolve().parents[3]


@dataclasses.dataclass(frozen=True)
class MoreOptions(DecodingOptions):
    """Options of decoding, and one more."""

    patience: float = option(2.5, "How long the search goes on.", minimum=1)


@with_options(MoreOptions())
class MoreBody(SearchBody, kw_only=True, forbid_unknown_fields=True):
    """A body of a request."""

    text: str


def parsed(options: Options | type[Options], *argv: str) -> flags.FlagValues:
    values = make_flags(**option_flags(options))
    startup.parse_flags(values, ["command", *argv], "Does something.")
    return values


def body_options(**fields: object) -> DecodingOptions:
    return parse(json.dumps({"text": "a", **fields}).encode(), MoreBody).options()


def test_one_more_option_is_a_flag_a_field_of_a_body_and_an_argument():
    asked = MoreOptions(patience=4)
    assert asked.patience == 4.0 and dataclasses.replace(asked, beam_size=1).patience == 4.0
    assert read_options(parsed(MoreOptions(), "--patience=4"), MoreOptions) == asked
    assert body_options(patience=4) == asked
    assert read_options(parsed(MoreOptions()), MoreOptions) == body_options() == MoreOptions()


def test_one_more_option_is_described_and_bounded_everywhere(capsys):
    with pytest.raises(SystemExit):
        parsed(MoreOptions(), "--help")
    out = " ".join(capsys.readouterr().out.split())
    assert "--patience=PATIENCE How long the search goes on. (default: 2.5)" in out
    assert "  patience: How long the search goes on." in MoreOptions.__doc__
    with pytest.raises(OptionError, match="^`patience=0`: a number of 1 or more was expected$"):
        MoreOptions(patience=0)
    with pytest.raises(ValueError, match="--patience=0"):
        parsed(MoreOptions(), "--patience=0")
    with pytest.raises(RequestError, match="^patience is 0.0; a number of 1 or more was expected$"):
        body_options(patience=0)


def test_commands_and_bodies_have_all_options_of_decoding():
    names = {field.name for field in dataclasses.fields(DecodingOptions)}
    assert names == set(declared(DecodingOptions))
    for command, missing in ((generate, set()), (translate, set()), (evaluate, {"best"})):
        assert names - set(command.define_flags()) == missing
    assert names == set(GenerateBody.__struct_fields__) - {"prompt", "stream", "timeout", "routing"}
    own = {"text", "prefix", "language", "timeout", "routing"}
    assert names == set(TranslateBody.__struct_fields__) - own
    page = (ROOT / "docs/serving.md").read_text()
    assert [name for name in names if f"`{name}`" not in page] == []
    assert GenerateBody().options() == DRAWING
    assert TranslateBody(text="a").options() == DecodingOptions()


def test_tuples_are_lists_on_a_command_line_and_in_a_body():
    argv = ("--allowed_tokens=5,7", "--stop=a,b", "--stop=c", "--beam_size=1")
    expected = MoreOptions(allowed_tokens=(5, 7), stop=("a,b", "c"), beam_size=1)
    assert read_options(parsed(MoreOptions(), *argv), MoreOptions) == expected
    found = body_options(allowed_tokens=[5, 7], stop=["a,b", "c"], beam_size=1)
    assert found == expected
    assert body_options(stop="a,b", beam_size=1).stop == ("a,b",)


def test_flags_of_a_class_have_no_defaults():
    values = parsed(DecodingOptions, "--beam_size=2", "--forbidden_tokens=3")
    assert given_options(values, DecodingOptions) == {"beam_size": 2, "forbidden_tokens": (3,)}
    assert values.temperature is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--top_p=0", "^`top_p=0.0`: a number above 0 and of 1 at most was expected"),
        ("--allowed_tokens=1,x", "^`allowed_tokens`: 'x'; a whole number of 0 or more was expec"),
        ("--allowed_tokens=-1", r"^`allowed_tokens\[0\]=-1`: a whole number of 0 or more was exp"),
        ("--most_tokens=9999999999", "^`most_tokens=9999999999`: .* that fits into 32 bits"),
    ],
)
def test_bounds_that_absl_does_not_know_are_checked_by_the_options(argv, message):
    with pytest.raises(ValueError, match=message):
        read_options(parsed(DecodingOptions(), argv), DecodingOptions)
