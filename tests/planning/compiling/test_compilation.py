"""What is tried, and said, after a compiler has failed."""

import jax
import pytest

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.runtime.compile_options import chosen
from lingvo_gshard.runtime.program.executable import _compile
from lingvo_gshard.wings.planning.compiling import compilation
from lingvo_gshard.wings.planning.compiling.cache import OptimizedHlo
from lingvo_gshard.wings.planning.machines import topologies

FAILED_CHECK = "INTERNAL: RET_CHECK failure (hlo_verifier.cc:608)"
REDUCE_SCATTERS = [
    name for name in chosen("tpu", "TPU v5", environment={}) if "reduce_scatter" in name
]


def compiled(monkeypatch, topology, options, errors):
    """Returns the result for a compiler that fails with these errors, and the options it got."""
    tried, pending = [], list(errors)

    def compile_with(options, *_):
        tried.append(options)
        if pending:
            raise jax.errors.JaxRuntimeError(pending.pop(0))
        return OptimizedHlo(proto=b"", memory={}, seconds=1.0, full_replications=[])

    monkeypatch.setattr(compilation, "_compile_with", compile_with)
    found = compilation._compile(None, topologies.get(topology), None, options)
    return found, tried


def test_options_that_fail_are_left_out_and_named(monkeypatch):
    options = chosen("tpu", "TPU v5", environment={})
    found, tried = compiled(monkeypatch, "v5p:2x2x1", options, [FAILED_CHECK])
    assert tried[0] == options
    assert tried[1] == {n: v for n, v in options.items() if n not in REDUCE_SCATTERS}
    assert found.note == compilation._FEWER_OPTIONS


def test_a_refused_option_is_not_tried_again(monkeypatch):
    error = "INVALID_ARGUMENT: No such compile option: 'bogus'"
    with pytest.raises(UserError, match="`compile_options=bogus=True`"):
        compiled(monkeypatch, "gpu:h100:1x8", {"bogus": "True"}, [error, error])


def test_other_errors_are_raised(monkeypatch):
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        compiled(monkeypatch, "v5p:2x2x1", {}, ["RESOURCE_EXHAUSTED: hbm"])


def test_a_training_is_compiled_without_the_options_that_fail():
    class Lowered:
        def compile(self, options):
            if options and REDUCE_SCATTERS[0] in options:
                raise jax.errors.JaxRuntimeError(FAILED_CHECK)
            return "compiled"

    result, _, options = _compile(Lowered(), "gspmd", {REDUCE_SCATTERS[0]: "True", "other": "1"})
    assert (result, options) == ("compiled", {"other": "1"})
