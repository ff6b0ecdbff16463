# tests: tools/console/spelling.py, core/errors.py
"""Options that the library quotes are spelled as flags of the command that runs."""

import pytest

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools.console import spelling


@pytest.fixture(autouse=True)
def command():
    spelling.spell_flags_of(("mesh", "runtime", "gin_param", "gin_file"))
    yield
    spelling.spell_flags_of(())


@pytest.mark.parametrize(
    ("written", "spelled"),
    [
        ("`mesh=data=8` needs `runtime=spmd`", "--mesh=data=8 needs --runtime=spmd"),
        ("`mesh` is empty", "--mesh is empty"),
        ("`settings` 'a = b': unknown name", "--gin_param 'a = b': unknown name"),
        ("`gin_files=x.gin` is missing", "--gin_file=x.gin is missing"),
        ("set `run.steps = 5`", "set --gin_param='run.steps = 5'"),
        ("`rows=1,8` is no flag here", "`rows=1,8` is no flag here"),
        ("`ls -l` and `mesh=data=2`", "`ls -l` and --mesh=data=2"),
        ("a ` of `mesh`", "a ` of `mesh`"),
        ("run.steps is 0", "run.steps is 0"),
        ("`a.b['c.d']=H->x` needs `mesh`", "a.b['c.d']=H->x needs --mesh"),
    ],
)
def test_options_become_flags(written, spelled):
    assert spelling.with_flags(written) == spelled


def test_settings_become_flags():
    assert spelling.flag_of("strategy=B->data") == "--strategy=B->data"
    assert spelling.flag_of("sharding.overrides = {'a': 'b'}") == (
        "--gin_param=sharding.overrides = {'a': 'b'}"
    )


def test_an_error_carries_its_option():
    assert UserError("`mesh=data=8` needs `runtime=spmd`").option == "mesh"
    assert UserError("set `run.steps = 5`").option == "run.steps"
    assert UserError("run.patience=3 needs run.keep_best").option == "run.patience"
    assert UserError("encoder.moe.router.k: 3 experts").option == "encoder.moe.router.k"
    assert UserError("there is no run").option == ""
    assert UserError("runs/a.b is a file").option == ""
    assert UserError("a ` alone").option == ""
