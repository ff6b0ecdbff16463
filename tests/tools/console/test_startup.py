"""What commands print for mistakes of users, for our bugs, and for errors in modules of users."""

import importlib.util
import textwrap

import pytest

import lingvo_gshard
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.initializers import Initializer
from lingvo_gshard.tools.console import spelling, startup


def run(main, capsys) -> str:
    """Returns what a command prints to standard error before it exits with 1."""
    try:
        code = startup.guarded("gshard-test", main)(["gshard-test"])
    except Exception as error:
        code = startup.show_bug("gshard-test", error)
    assert code == 1
    return capsys.readouterr().err


def test_a_users_mistake_is_one_sentence(capsys):
    def main(argv):
        raise UserError("`mesh=data=3` needs 3 devices")

    assert run(main, capsys) == "gshard-test: error: `mesh=data=3` needs 3 devices\n"
    spelling.spell_flags_of(["mesh"])
    assert run(main, capsys) == "gshard-test: error: --mesh=data=3 needs 3 devices\n"
    spelling.spell_flags_of([])


def test_a_missing_file_is_one_sentence(capsys):
    assert run(lambda argv: open("no/such/file"), capsys) == (
        "gshard-test: error: no/such/file: No such file or directory\n"
    )


@pytest.mark.parametrize(
    "statement", ["list(zip([1], [], strict=True))", "int('x')", "raise ValueError('own')"]
)
def test_an_error_within_the_package_is_a_bug(statement, capsys):
    """The last frame decides nothing: zip() has none of its own."""
    code = compile(f"def fails(argv):\n  {statement}", Initializer.__module__, "exec")
    names: dict = {}
    file = importlib.util.find_spec(Initializer.__module__).origin
    exec(code.replace(co_filename=file, co_consts=_in_file(code.co_consts, file)), names)
    *above, last = run(names["fails"], capsys).splitlines()
    assert "Traceback (most recent call last):" in above and "ValueError: " in above[-1]
    assert f"this is a bug of lingvo_gshard {lingvo_gshard.__version__}" in last
    assert "report it" in last


def _in_file(constants, file):
    return tuple(c.replace(co_filename=file) if hasattr(c, "co_filename") else c for c in constants)


def test_an_error_in_a_users_module_names_its_line(tmp_path, capsys):
    path = tmp_path / "my_layer.py"
    path.write_text(
        textwrap.dedent("""
        def fprop(argv):
            return int("three")
        """)
    )
    spec = importlib.util.spec_from_file_location("my_layer", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    *above, last = run(module.fprop, capsys).splitlines()
    assert "Traceback (most recent call last):" in above
    assert last == (
        f"gshard-test: {path}:3 raised this ValueError. It is no module of lingvo_gshard"
    )
