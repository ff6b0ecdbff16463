# tests: /docs/site/, tools/completion.py, tools/flags/definitions.py
"""Tests the reference of the site: it has each name once, with what the code declares of it."""

import inspect
import re

import pytest

import lingvo_gshard as gshard
from docs.site import code_links, commands, hyperparameters, markdown, python_api
from lingvo_gshard.core import Params, registry
from lingvo_gshard.core.config.params import Configurable
from lingvo_gshard.tools import completion
from lingvo_gshard.tools.console import launcher
from lingvo_gshard.tools.flags.definitions import integer, make_flags, repeated, string, switch


@pytest.fixture(scope="module")
def pages():
    return commands.pages()


def test_every_command_has_a_place():
    grouped = [tool for tools in commands.GROUPS.values() for tool in tools]
    assert sorted(grouped) == list(launcher.tool_names())


def test_every_flag_of_every_command_has_one_anchor_and_one_description(pages):
    described = re.compile(r"^#+ `--(\w+)[^`]*` \{ #(\S+) \}\n\n(\S.*)$", re.MULTILINE)
    shared = {name: text for name, _, text in described.findall(pages["commands/flags.md"])}
    # Completion finds the commands and their flags on its own.
    for found in completion.commands():
        page = pages[f"commands/{found.name.removeprefix('gshard-')}.md"]
        own = {anchor for _, anchor, _ in described.findall(page)}
        for subcommand, flags in found.flags.items():
            inner = subcommand if found.name != "gshard-completion" else ""
            for flag in flags:
                if flag.name not in ("help", "version", "import"):
                    anchor = f"{inner}--{flag.name}"
                    assert page.count(f"{{ #{anchor} }}") == 1, (found.name, anchor)
                    assert (anchor in own) != (
                        f"[`--{flag.name}`](flags.md#--{flag.name}){{ #{anchor} }}" in page
                    )
                    assert anchor in own or flag.name in shared
    for name in ("help", "version", "import"):
        assert f"{{ #--{name} }}" in pages["commands.md"]


def test_links_to_flags_have_targets(pages):
    anchors = {name: set(re.findall(r"\{ #(\S+) \}", page)) for name, page in pages.items()}
    count = 0
    for name, page in pages.items():
        folder = name.rpartition("/")[0]
        for path, anchor in re.findall(r"\]\(([\w/.]*\.md)?#([\w-]+)\)", page):
            target = f"{folder}/{path}".lstrip("/") if path else name
            assert anchor in anchors[target], (name, target, anchor)
            count += 1
    assert count > 400


def test_a_shared_flag_is_described_once(pages):
    text = "Which checkpoint is read: best, as run.keep_best measures it"
    assert [name for name, page in pages.items() if text in page] == ["commands/flags.md"]


@pytest.mark.parametrize(
    ("definition", "form", "facts"),
    [
        (integer("Text.", 3, 1), "--it=INTEGER", " *1 or more; default `3`.*"),
        (string("Text.", None, ("a", "b")), "--it=TEXT", " *One of `a`, `b`.*"),
        (repeated("Text; may be repeated."), "--it=TEXT", " *May be repeated.*"),
        (switch("Text."), "--it", ""),
        (string("Text."), "--it=TEXT", ""),
    ],
)
def test_a_flag_is_described_by_its_declaration(definition, form, facts):
    flag = make_flags(it=definition)["it"]
    assert (commands.form(flag), commands.facts(flag)) == (form, facts)
    assert commands.meaning(flag) == "Text."


def test_flags_and_commands_in_a_text_are_links_once():
    train = commands.commands()["train"][0]
    links = commands.Links(train, "train.md")
    (line,) = links.within(
        ["A file of gshard-plan --json, --steps, --steps=3, --step.clip_norm=1 and `--mesh`."]
    )
    assert line == (
        "A file of [`gshard-plan --json`](plan.md#--json), [`--steps`](#--steps), `--steps=3`, "
        "`--step.clip_norm=1` and `--mesh`."
    )
    (line,) = links.within(["gshard-bench step and gshard-plan needs --logdir (docs/runs.md)"])
    assert line == (
        "[`gshard-bench step`](bench.md#step) and [`gshard-plan`](plan.md) needs "
        "[`--logdir`](#--logdir) ([Watch and resume a run](../../runs.md))"
    )


@pytest.mark.parametrize(
    ("code", "place"),
    [
        ("gshard-train", "commands/train.md"),
        ("gshard-train --steps=3", "commands/train.md#--steps"),
        ("gshard-train --mesh", "commands/flags.md#--mesh"),
        ("gshard-bench step --profile", "commands/bench.md#step--profile"),
        ("gshard-bench", "commands/bench.md"),
        ("gshard-plan diff", ""),
        ("gshard-train --stps", ""),
        ("gshard-trian", ""),
        ("gshard.load", "python.md#gshardload"),
        ("gshard.experiments()", "python.md#gshardexperiments"),
        ("gshard.laod", ""),
    ],
)
def test_code_has_a_place_in_the_reference(code, place):
    assert code_links.address(code) == place


def test_code_on_a_page_is_a_link_at_its_first_mention():
    code = "`gshard-plan`"
    page = f"# {code}\n\n{code}, [{code}](a.md), {code}\n\n```\n{code}\n```\n"
    link = "[`gshard-plan`](../reference/commands/plan.md)"
    first = page.index("`gshard-plan`,")
    expected = page[:first] + link + page[first + len("`gshard-plan`") :]
    assert code_links.with_links(page, "../") == expected


def test_choices_of_a_flag_are_completed():
    (command,) = [each for each in completion.commands() if each.name == "gshard-plan"]
    offered = {flag.name: flag.values for flag in command.flags[""]}
    assert "bfloat16" in offered["search_precision"] and "shardy" in offered["partitioner"]
    assert "v3:32x32" in offered["topology"]


def test_public_names_are_in_the_order_of_use():
    names = [name for names in python_api.GROUPS.values() for name in names]
    assert sorted(names) == sorted(gshard.__all__) and names.index("train") < names.index("load")
    page = python_api.page()
    places = [page.index(f"### gshard.{name}\n") for name in names if name != "keras"]
    assert places == sorted(places) and "### gshard.keras.fit\n" in page


def test_signatures_have_types_markers_and_no_addresses():
    def function(
        one: "str | None" = None,
        /,
        two: object = object(),
        *,
        three: int,  # noqa: B008
    ) -> None:
        del one, two, three

    function.__annotations__["return"] = "None"
    text = "(one: str | None = None, /, two: object = ..., *, three: int) -> None"
    assert python_api.signature(function) == text
    assert "\n) -> Plan" in python_api.signature(gshard.plan)
    assert "    /,\n    specs: " in python_api.signature(gshard.plan)


def test_options_show_inherited_fields_with_links_to_their_flags():
    lines = python_api.with_fields(gshard.RuntimeOptions).splitlines()
    assert "- `mesh: str | None = None`: [`--mesh`](commands/flags.md#--mesh)." in lines
    assert len([line for line in lines if line.startswith("- `compile_options: ")]) == 1
    assert not [line for line in lines if line.startswith("- `") and "](commands/" not in line][2:]


def test_docstrings_become_markdown():
    text = markdown.of_docstring(
        """Returns something.

            >>> 1 + 1
            2

        Args:
          x: the first,
            on two lines.
          y: as for `fit`.
          z: as for `fit`.

        Raises:
          UserError: never.
        """
    )
    assert re.sub(r"\n\n+", "\n\n", text) == "\n".join(
        [
            *("Returns something.", "", "```pycon", ">>> 1 + 1", "2", "```", "", "**Args**", ""),
            *("- `x`: the first,", "    on two lines.", "- `y`, `z`: as for `fit`", ""),
            *("**Raises**", "", "- `UserError`: never."),
        ]
    )


class Base(Configurable):
    """Is inherited from. It has a second sentence."""

    @classmethod
    def params(cls) -> Params:
        p = super().params()
        p.define("size", 1, "Its size.", minimum=1)
        p.define("kind", "a", "Its kind.", choices=("a", "b"))
        return p


class Derived(Base):
    """Inherits."""

    @classmethod
    def params(cls) -> Params:
        p = super().params().set(size=2)
        p.define("own", True, "Its own.")
        return p


def test_a_class_shows_what_its_bases_do_not():
    tree = Params()
    tree.define("node", Derived.params().set(kind="b"), "A node.")
    found = hyperparameters.classes([tree])
    assert found == [Base, Derived]
    assert [name for name, _ in hyperparameters.own(Derived).items()] == ["size", "own"]


def _sections_of_classes():
    page = hyperparameters.page()
    return dict(re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", page, re.MULTILINE | re.DOTALL))


def test_other_classes_that_a_setting_may_name_are_on_the_page():
    sections = _sections_of_classes()
    for name in ("Adafactor", "Adam", "Lion", "Momentum", "Muon", "SwitchRouter", "TextReader"):
        assert "| `" in sections[name], name
    assert "Decay of the second moment" in sections["Adam"]
    assert "TokenEmbedding" not in sections  # a part of tasks


def test_each_hyperparameter_of_the_experiments_is_on_the_page():
    sections = _sections_of_classes()
    for name in hyperparameters.TREES:
        for path, node in registry.get(name).nodes():
            bases = inspect.getmro(node.cls) if node.cls else ()
            shown = [sections.get(base.__name__, "") for base in bases] or [sections[path]]
            for child, value in node.items():
                if not hyperparameters.holds_params(value):
                    assert any(f"| `{child}` | `" in text for text in shown), (path, child)


def test_examples_of_a_help_page_are_in_blocks_of_the_shell(pages):
    for tool, several in commands.commands().items():
        page = pages[f"commands/{tool}.md"]
        blocks = "\n".join(re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
        for command in several:
            examples = re.findall(r"^    (gshard-.*)$", command.about, re.MULTILINE)
            assert all(example in blocks for example in examples), command.name
