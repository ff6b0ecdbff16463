# tests: tools/doctor.py, tools/diagnosis/accelerator/checks.py
# tests: tools/diagnosis/accelerator/exchanges.py, tools/diagnosis/accelerator/kernels.py
# tests: tools/diagnosis/accelerator/layers.py, tools/diagnosis/accelerator/references.py
# tests: tools/diagnosis/accelerator/report.py, tools/diagnosis/accelerator/trials.py
"""gshard-doctor --accelerator: on CPU devices all is right, and what a test made wrong is named."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf

from lingvo_gshard.core.progress import SILENT
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.sharding import collectives
from lingvo_gshard.tools import doctor
from lingvo_gshard.tools.benchmarks.exported import SavedStep
from lingvo_gshard.tools.diagnosis.accelerator import checks, kernels, layers, report, trials
from lingvo_gshard.tools.diagnosis.accelerator.checks import CHECKS, AcceleratorCheck, run_checks
from lingvo_gshard.tools.diagnosis.accelerator.trials import Machine, Outcome
from lingvo_gshard.tools.diagnosis.environment import Check, State, Timing
from lingvo_gshard.wings.dropless.exchanges import EXCHANGES, GatheredExchange
from lingvo_gshard.wings.hlo.operations import Collective, Operation
from lingvo_gshard.wings.kernels import exchange as kernels_of_exchange
from lingvo_gshard.wings.kernels import kernel
from lingvo_gshard.wings.planning.machines import topologies

# A check of each kind that takes a few seconds.
SHARE = ("product", "attention over a cache", "product, fp8", "collectives", "ragged rows")


def named(*names):
    return [check for check in CHECKS if check.name in names]


def run(machine, *names):
    """Returns what the checks of some names find, by name."""
    return {check.name: check for check in run_checks(machine, SILENT, named(*names))}


def not_right(found):
    return [check for check in found.values() if check.state in (State.FAILURE, State.WARNING)]


@pytest.fixture(name="eight")
def _eight():
    return Machine(devices_for(8))


def make_wrong(monkeypatch, name, change):
    """Makes the bodies of a kernel return other numbers."""
    right = kernel.marked(f"lingvo_gshard.kernels.{name}")

    def changed(body):
        return lambda *arguments, **options: change(*body(*arguments, **options))

    bodies = {platform: changed(body) for platform, body in right.bodies.items()}
    monkeypatch.setitem(kernel._kernels, name, dataclasses.replace(right, bodies=bodies))


def test_a_share_of_the_checks_finds_that_all_is_right(eight):
    found = run(eight, *SHARE)
    assert not not_right(found)
    assert {"product", "attention over a cache, tpu", "all-to-all", "ragged rows"} <= set(found)
    # Times of virtual devices say nothing.
    assert all(check.timing is None for check in found.values())


def test_a_wrong_kernel_is_named(monkeypatch, eight):
    make_wrong(monkeypatch, "cache_attention", lambda mixed: (mixed.at[0, 1, 3].add(0.01),))
    found = run(eight, "attention over a cache", "product, fp8")
    assert {check.name for check in not_right(found)} == {
        "attention over a cache, cuda",
        "attention over a cache, tpu",
    }
    assert "differs from the reference by" in found["attention over a cache, tpu"].found


def test_a_kernel_that_returns_nan_is_named(monkeypatch, eight):
    make_wrong(monkeypatch, "cache_attention", lambda mixed: (mixed.at[0, 0, 0].set(np.nan),))
    found = run(eight, "attention over a cache")
    assert found["attention over a cache, cuda"].state == State.FAILURE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attention_gradient", "grouped_products_gradient"])
def test_a_wrong_gradient_is_named(monkeypatch, eight, name):
    make_wrong(monkeypatch, name, lambda first, *others: (first.at[..., 0, 0].add(1.0), *others))
    chosen = "attention, causal" if "attention" in name else "grouped products"
    assert len(not_right(run(eight, chosen))) == 2


def test_ragged_rows_that_arrive_in_another_order_are_named(monkeypatch, eight):
    exchange = kernels_of_exchange.exchange
    monkeypatch.setattr(kernels_of_exchange, "exchange", lambda *given: exchange(*given)[::-1])
    found = run(eight, "ragged rows")
    assert found["ragged rows"].state == State.FAILURE


@pytest.mark.slow
def test_an_exchange_that_loses_the_tokens_of_a_device_is_named(monkeypatch, eight):
    compute = GatheredExchange.compute

    def losing(exchange, *arguments):
        y, over_bound = compute(exchange, *arguments)
        is_there = collectives.place_along(exchange.axes) != 2
        return y * tf.cast(is_there, y.dtype), over_bound

    monkeypatch.setattr(GatheredExchange, "compute", losing)
    found = run(eight, "exchange, gathered", "exchange, fixed")
    assert not_right(found) == [found["exchange, gathered"]]
    assert found["exchange, fixed"].state == State.OK


def test_what_a_machine_lacks_is_skipped_by_name():
    one = Machine(devices_for(8)[:1])
    lacking = [check.name for check in CHECKS if check.needs(one)]
    assert {"collectives", "sharded step", "exchange, fixed", "layer, experts, ragged"} <= {
        *lacking
    }
    found = run(one, "exchange, fixed")
    assert found["exchange, fixed"] == Check(
        "exchange, fixed", State.SKIPPED, "it needs two devices or more, and there is one"
    )
    assert (
        kernels.CASES["attention, learned bias"](kernels.Request(one, "tpu_interpreted"))
        == "Splash attention has no learned bias"
    )


def test_a_check_that_raises_has_failed_and_the_others_go_on(eight):
    def broken(machine):
        raise RuntimeError("no memory\nand more")

    table = [AcceleratorCheck("broken", broken), *named("product, int8")]
    found = list(run_checks(eight, SILENT, table))
    assert found[0] == Check("broken", State.FAILURE, "RuntimeError: no memory")
    assert [check.state for check in found[1:]] == [State.OK, State.OK]


def test_each_exchange_takes_part():
    names = {check.name for check in CHECKS}
    for exchange in EXCHANGES:
        assert {f"exchange, {exchange}", f"layer, experts, {exchange}"} <= names


@pytest.mark.slow
def test_every_kernel_takes_part(monkeypatch, eight):
    """Kernels without an entry would never be checked. The emulated exchange is none on CPUs."""
    used = set()
    body = kernel.Kernel.body

    def noting(one, platform):
        used.add(one.name)
        return body(one, platform)

    monkeypatch.setattr(kernel.Kernel, "body", noting)
    found = run(eight, *kernels.CASES)
    assert not not_right(found)
    assert used == set(kernel._kernels) - {"exchange"}


def test_the_plan_of_a_collective_is_that_of_the_planner():
    """208.1 us for 64 MiB are published, see measured.toml."""
    machine = Machine(devices_for(8))
    machine.__dict__["topology"] = topologies.get("gpu:h100:1x8")
    size = 2**26
    seconds = trials.planned_collective("all-gather", size, machine)
    assert seconds == pytest.approx(208.1e-6)
    point = trials.measured_point("all-gather", size, seconds, machine)
    assert point == (
        'MeasuredCollective("gpu:h100:1x8", "all-gather", 8, 67108864, 0.000208, _HERE)'
    )


def test_rates_are_amounts_by_seconds():
    product = Operation("a", "dot", "", "other", times=2, matmul_flops=10**12, bytes=2**30)
    gather = Collective("all-gather", ("data",), 4, "float32", 2**30)
    sent = Operation("b", "all-gather", "", "other", collective=gather)
    outcome = Outcome(0.0, 0.5, 0.25, [product, sent])
    for unit, shown in (
        (trials.FLOPS, "4 TFLOP/s"),
        (trials.READ, "4 GiB/s read"),
        (trials.SENT, "1.5 GiB/s sent"),
    ):
        timing = outcome.timing(unit)
        assert timing.shown(timing.seconds) == shown
    check = Check("x", State.OK, "y", timing=outcome.timing(trials.FLOPS))
    assert report.row(check) == ("x", "ok", "4 TFLOP/s", "8", "50%")
    assert report.row(Check("x", State.OK, "y", timing=Timing(0.5)))[2:] == ("500 ms", "", "")


def checks_of(**seconds):
    """Returns checks that are right, with their seconds; None has failed."""
    return [
        Check(
            name,
            State.FAILURE if taken is None else State.OK,
            "found",
            timing=Timing(taken or 1e-9, amount=1e12, unit="TFLOP/s"),
        )
        for name, taken in seconds.items()
    ]


def test_settings_follow_what_was_found(eight):
    times = {"gathered": (0.02, 0.012), "fixed": (0.001, 0.010), "ragged": (None, 0.001)}
    found = {f"exchange, {name}": one for name, (one, _) in times.items()}
    found |= {f"layer, experts, {name}": step for name, (_, step) in times.items()}
    found |= {"attention, packed": 0.008, "attention, packed, most_segments": 0.004}
    found |= {"product": 0.010, "product, fp8": 0.006, "attention, window": None}
    advised = {each.setting: each.why for each in report.settings(checks_of(**found), eight)}
    assert advised["dispatch.exchange = 'fixed'"].endswith("never ragged, which failed")
    assert "attention, window" in advised["kernel.use_fused = False"]
    assert "input.most_segments = 16" in advised
    assert "1.7 times" in advised["step.precision = 'fp8'"]
    found |= {"product, fp8": 0.0099, "layer, experts, fixed": 0.013, "attention, packed": 0.0041}
    advised = {each.setting: each.why for each in report.settings(checks_of(**found), eight)}
    assert "dispatch.exchange = 'gathered'" in advised
    assert not {"step.precision = 'fp8'", "input.most_segments = 16"} & set(advised)


@pytest.mark.slow
def test_a_layer_whose_loss_is_not_finite_is_named(monkeypatch):
    call, calls = SavedStep.__call__, []

    def spoiled(step):
        calls.append(step)
        wait = call(step)
        return wait if len(calls) < 5 else lambda: wait() * np.nan

    monkeypatch.setattr(SavedStep, "__call__", spoiled)
    (check,) = layers.check_layer(layers.DENSE, Machine(devices_for(2)))
    assert check.state == State.FAILURE and "nan after 8 steps" in check.found


def test_the_command_writes_a_page_and_fails_only_after_a_failure(monkeypatch, tmp_path, capsys):
    page, file = tmp_path / "page.md", tmp_path / "all.json"
    arguments = ["gshard-doctor", "--accelerator", "--devices=2"]
    arguments += [f"--page={page}", f"--json={file}"]
    monkeypatch.setattr(doctor, "_checks", lambda *_: iter(()))
    skipped = AcceleratorCheck("skipped one", lambda machine: iter(()), lambda machine: "no links")
    wrong = Check("wrong | one", State.FAILURE, "differs by 0.1", "do not train")
    failing = AcceleratorCheck("wrong", lambda machine: iter([wrong]))
    whole = checks.run_checks
    for table, code in ((named("product"), 0), ([failing, skipped], 1)):
        monkeypatch.setattr(
            checks, "run_checks", lambda *given, table=table: whole(*given, checks=table)
        )
        assert doctor.main(arguments) == code
    text, printed = page.read_text(), capsys.readouterr().out
    assert "| wrong \\| one | failure |" in text and "- **devices**: 2 x cpu" in text
    assert "failure: wrong | one: differs by 0.1. do not train" in printed
    assert "skipped: skipped one: no links" in printed
    record = json.loads(file.read_text())
    assert [check["state"] for check in record["checks"]] == ["failure", "skipped"]
    assert record["machine"]["topology"] == "cpu:2"


def test_a_page_without_an_accelerator_is_refused():
    with pytest.raises(ValueError, match="--page=x.md applies to --accelerator"):
        doctor.main(["gshard-doctor", "--page=x.md"])


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 8])
def test_all_checks_run_to_their_end_on_cpus(count):
    found = list(run_checks(Machine(devices_for(8)[:count]), SILENT))
    assert not [check for check in found if check.state in (State.FAILURE, State.WARNING)]
    assert sum(check.state == State.OK for check in found) >= (30 if count == 1 else 50)
