# tests: runtime/compile_options.py, runtime/step_compiler.py, wings/compiler_options/table.py
"""Checks the compiler options of steps: the table, changes to it, and what compilers refuse."""

import pathlib
import re
import types

import jax
import pytest
import tensorflow as tf

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.runtime.compile_options import (
    NONE,
    CompileOptions,
    Traits,
    after_failure,
    check_refusal,
    chosen,
    chosen_for,
    options_in_words,
)
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.program import executable
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.runtime.step_compiler import StepCompiler, traits_of
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.compiler_options.table import (
    ALL_TO_ALLS,
    OPTIONS,
    PARALLEL,
    has_parallel_collectives,
    notes_on_ragged_exchanges,
    option_variants,
)
from lingvo_gshard.wings.functions.partition import partition
from lingvo_gshard.wings.planning.machines.chips import CHIPS
from tests.layers.stacks.executions import loop
from tests.runtime import tiny_translation

# Groups of options in the table.
COLLECTIVE_PRODUCTS, WHOLE_PRODUCTS = "collective matrix products", "whole products"
PIPELINED = "pipelined collectives"

PAGE = "docs/memory_and_communication.md"
PLATFORMS = {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}
GATHER = "xla_enable_async_all_gather"
MATMULS = "xla_tpu_all_gather_collective_matmul_mode"


def test_each_option_has_one_row_with_reason_and_source():
    names = [each.name for each in OPTIONS]
    assert len(names) == len(set(names))
    for each in OPTIONS:
        assert each.platform in ("tpu", "cuda") and each.reason and each.value
        assert re.match(r"https://|docs/", each.source)


def test_the_documentation_has_the_options_that_are_off_everywhere():
    page = (pathlib.Path(__file__).parents[2] / PAGE).read_text(encoding="utf-8")
    chips = [chip for chip in CHIPS.values() if chip.device_kinds]
    off = {
        each.name
        for each in OPTIONS
        if not any(each.is_on(PLATFORMS[chip.kind], chip.device_kinds[0]) for chip in chips)
    }
    section = page[page.index("These are off by default") : page.index("`--compile_options` of")]
    named = set(re.findall(r"`(xla_\w+)", section))
    assert len(off) > 5 and off <= named <= {each.name for each in OPTIONS}


def test_other_platforms_have_no_options():
    for platform in ("cpu", "rocm"):
        assert chosen(platform, "any", environment={}) == {}


def test_the_table_decides_by_platform_and_device():
    v3, v5p, tpu7x, h100, a100 = (
        chosen(platform, kind, environment={})
        for platform, kind in (
            ("tpu", "TPU v3"),
            ("tpu", "TPU v5"),
            ("tpu", "TPU7x"),
            ("cuda", "NVIDIA H100 80GB HBM3"),
            ("cuda", "NVIDIA A100-SXM4-80GB"),
        )
    )
    assert v3[GATHER] == v5p[GATHER] == "True" and tpu7x == {}
    assert v5p == v3 and MATMULS not in v5p
    assert all(name.startswith("xla_gpu_") for name in h100)
    assert set(h100) - set(a100) == {name for name in h100 if "pipelined" in name} != set()
    assert "xla_gpu_enable_while_loop_double_buffering" not in h100


H100 = "NVIDIA H100 80GB HBM3"
# What XLA may do beside a collective, which is wrong beside a ragged one.
OVERLAPPING = {
    "xla_gpu_enable_latency_hiding_scheduler": "False",
    "xla_gpu_enable_pipelined_all_gather": "False",
    "xla_gpu_enable_pipelined_reduce_scatter": "False",
    "xla_gpu_enable_pipelined_all_reduce": "False",
    "xla_gpu_experimental_parallel_collective_overlap_limit": "1",
}


def test_nothing_overlaps_a_ragged_exchange_on_gpus():
    plain, ragged = (
        chosen("cuda", H100, environment={}, traits=Traits(is_ragged=is_ragged))
        for is_ragged in (False, True)
    )
    assert ragged == {**plain, **OVERLAPPING}
    a100 = chosen("cuda", "NVIDIA A100-SXM4-80GB", environment={}, traits=Traits(is_ragged=True))
    assert a100 == OVERLAPPING
    v5p = [chosen("tpu", "TPU v5", (), {}, Traits(is_ragged=ragged)) for ragged in (False, True)]
    assert v5p[0] == v5p[1]


class Calls:
    """Stands for a program that calls functions by these names."""

    def __init__(self, *names):
        self._names = names

    def calls(self, name, platform):
        return platform == "cuda" and name in self._names


def test_a_step_with_a_ragged_exchange_says_what_it_is_compiled_without():
    h100, ragged, plain = device("cuda", H100), Calls("ragged_all_to_all"), Calls("all_to_all")
    options = chosen_for(h100, program=ragged)
    assert OVERLAPPING.items() <= options.items()
    assert chosen_for(h100, program=plain) == chosen_for(h100)
    (note,) = notes_on_ragged_exchanges(ragged, h100, options)
    assert note.startswith("nothing overlaps the ragged exchanges of this step")
    assert not notes_on_ragged_exchanges(plain, h100, chosen_for(h100))
    assert not notes_on_ragged_exchanges(ragged, device("tpu", "TPU v5"), {})
    given = ("xla_gpu_enable_latency_hiding_scheduler=true",)
    (note,) = notes_on_ragged_exchanges(ragged, h100, chosen_for(h100, given, program=ragged))
    assert note.startswith("`compile_options` keeps xla_gpu_enable_latency_hiding_scheduler, with")


def device(platform, kind):
    """Returns what a device says about itself."""
    client = types.SimpleNamespace(platform_version="cuda")
    platform = "gpu" if platform == "cuda" else platform
    return types.SimpleNamespace(platform=platform, device_kind=kind, client=client)


def test_variants_are_the_options_that_are_off():
    v5p = option_variants(device("tpu", "TPU v5"))
    assert set(v5p) == {COLLECTIVE_PRODUCTS, ALL_TO_ALLS, WHOLE_PRODUCTS}
    assert WHOLE_PRODUCTS not in option_variants(device("tpu", "TPU v5 lite"))
    assert [each.partition("=")[0] for each in v5p[COLLECTIVE_PRODUCTS]] == [
        MATMULS,
        MATMULS.replace("all_gather", "reduce_scatter"),
    ]
    assert set(option_variants(device("cuda", "NVIDIA H100 80GB HBM3"))) == {PARALLEL}
    a100 = option_variants(device("cuda", "NVIDIA A100-SXM4-80GB"))
    assert set(a100) == {PIPELINED, PARALLEL} and len(a100[PIPELINED]) == 3
    assert has_parallel_collectives(chosen("cuda", "NVIDIA A100", a100[PARALLEL], {}))
    assert not has_parallel_collectives(chosen("cuda", "NVIDIA A100", (), {}))
    assert option_variants(device("cpu", "cpu")) == {}


def test_options_that_are_given_are_no_variants():
    found = option_variants(device("tpu", "TPU v5"), [f"{MATMULS}=NONE"])
    assert len(found[COLLECTIVE_PRODUCTS]) == 1
    # A variant is one that steps can be compiled with.
    for options in found.values():
        assert all(
            each in options_in_words(chosen("tpu", "TPU v5", options, {})) for each in options
        )


def test_given_options_change_the_table():
    table = chosen("tpu", "TPU v5", environment={})
    assert chosen("tpu", "TPU v5", (NONE,), {}) == {}
    assert chosen("tpu", "TPU v5", (NONE, "xla_a=true"), {}) == {"xla_a": "True"}
    without = {name: value for name, value in table.items() if name != GATHER}
    assert chosen("tpu", "TPU v5", (f"{GATHER}=",), {}) == without
    changed = chosen("tpu", "TPU v5", (f"{GATHER}=false", "xla_b=7"), {})
    assert changed == {**table, GATHER: "False", "xla_b": "7"}
    assert options_in_words({"xla_a": "True", "xla_b": "7"}) == "xla_a=True, xla_b=7"


def test_the_environment_overrides_the_table_but_not_what_is_given():
    environment = {"LIBTPU_INIT_ARGS": f"--xla_x=1 --{GATHER}=false"}
    assert GATHER not in chosen("tpu", "TPU v5", (), environment)
    assert chosen("tpu", "TPU v5", (f"{GATHER}=true",), environment)[GATHER] == "True"


def test_an_option_without_a_value_is_refused():
    with pytest.raises(UserError, match="`compile_options=xla_a`: expected none, or name=value"):
        chosen("cpu", "cpu", ("xla_a",), {})
    assert CompileOptions(compile_options=["xla_a=1"]).compile_options == ("xla_a=1",)


def test_a_compilers_refusal_names_the_option():
    options = {"xla_ab": "1", "xla_a": "perhaps"}
    for message in (
        "INVALID_ARGUMENT: No such compile option: 'xla_a'",
        "INVALID_ARGUMENT: While setting option xla_a, 'perhaps' is not a valid bool value.",
        "INVALID_ARGUMENT: Failed to parse 'perhaps' into flag xla_a: \n",
    ):
        with pytest.raises(UserError, match="`compile_options=xla_a=perhaps`") as raised:
            check_refusal(message, options)
        assert raised.value.option == "compile_options"
    check_refusal("INTERNAL: xla_a", options)
    check_refusal("No such compile option: 'xla_c'", options)


def make_program():
    run = partition(lambda x: x * 2.0, "data=2", "data", layouts=["BM"])
    return run.lower(tf.TensorSpec((4, 8)))


def test_steps_on_cpus_are_compiled_without_options():
    compiler = StepCompiler()
    step = compiler.step("train", 0, devices_for(2), lambda: (make_program(), []))
    assert step.executable.options == {}


def test_steps_are_compiled_with_what_is_given():
    name = "xla_cpu_enable_fast_math"
    compiler = StepCompiler((f"{name}=true",))
    step = compiler.step("train", 0, devices_for(2), lambda: (make_program(), []))
    assert step.executable.options == {name: "True"}
    assert f"compiled with {name}=True" in compiler.pop_messages()
    refused = StepCompiler(("xla_unknown=1",))
    with pytest.raises(UserError, match="`compile_options=xla_unknown=1`.*No such compile option"):
        refused.step("train", 0, devices_for(2), lambda: (make_program(), []))


def test_caches_tell_programs_with_other_options_apart(tmp_path, monkeypatch):
    """Both jax's cache of programs and the stored output of the compiler."""
    monkeypatch.setattr(executable, "_LEAST_SECONDS", 0.0)
    executable.keep_in(tmp_path)
    try:
        program, devices = make_program(), devices_for(2)
        fast = {"xla_cpu_enable_fast_math": "True"}
        runs = (None, fast, None, fast)
        found = [Executable(program, devices, options, is_called=False) for options in runs]
        assert [each.is_cached for each in found] == [False, False, True, True]
        executable.with_earlier_output(program.digest, "plain")
        plain = Executable(program, devices, is_called=False)
        assert plain.compiler_output == "plain"
        assert Executable(program, devices, fast).compiler_output != "plain"
    finally:
        jax.config.update("jax_compilation_cache_dir", None)


def test_a_failed_check_of_the_compiler_is_tried_without_the_options_that_cause_it():
    options = chosen("tpu", "TPU v5", environment={})
    fewer = after_failure("INTERNAL: RET_CHECK failure (hlo_verifier.cc:608)", options)
    assert fewer is not None
    assert set(options) - set(fewer) == {name for name in options if "reduce_scatter" in name}
    assert after_failure("INTERNAL: RET_CHECK failure", fewer) is None
    assert after_failure("RESOURCE_EXHAUSTED", options) is None


@pytest.mark.parametrize(
    ("strategy", "mesh", "parts", "expected"),
    [
        ("zero1_sequence_tensor", "data=2,model=4", 2, True),
        ("zero1_sequence_tensor", "data=2,model=4", 1, False),
        ("fsdp_sequence_tensor", "data=2,model=4", 2, False),
        ("data", "data=8", 2, True),
        ("expert_fsdp", "data=2,fsdp=4", 2, False),
    ],
)
def test_all_gathers_of_micro_batches_with_whole_weights_are_not_pipelined(
    strategy, mesh, parts, expected
):
    trainer = tiny_translation.trainer(micro_batches=parts)
    found = traits_of(trainer, Partitioning.make(mesh, strategy))
    assert found.in_parts == expected
    options = chosen("cuda", "NVIDIA H100 80GB HBM3", environment={}, traits=found)
    assert ("xla_gpu_enable_pipelined_all_gather" in options) == (not expected)
    assert "xla_gpu_enable_pipelined_reduce_scatter" in options


@pytest.mark.parametrize(
    ("strategy", "precision", "parts", "repeats", "expected"),
    [
        ("zero1", "bfloat16", 1, True, True),
        ("zero1", "bfloat16", 2, True, False),
        ("zero1", "bfloat16", 1, False, False),
        ("zero1", "float32", 1, True, False),
        ("fsdp", "bfloat16", 1, True, False),
    ],
)
def test_weights_that_loops_gather_ahead_are_gathered_together(
    strategy, precision, parts, repeats, expected
):
    stack = {"execution": loop()} if repeats else {}
    trainer = tiny_translation.trainer(precision=precision, micro_batches=parts, stack_values=stack)
    found = traits_of(trainer, Partitioning.make("data=8", strategy))
    assert found.gathers_ahead == expected
    options = chosen("cuda", "NVIDIA H100 80GB HBM3", environment={}, traits=found)
    assert ("xla_gpu_all_gather_combine_threshold_bytes" in options) == expected
