"""Directories of runs that nobody trained: what a report reads, with everything in it."""

import json
import math
import pathlib

import msgspec
import numpy as np

from lingvo_gshard.training.run import run_records
from lingvo_gshard.training.run.run_records import EvaluationRow, Launch, Sharding, TensorSharding
from lingvo_gshard.wings.profiling.comparison import Comparison, PartComparison
from lingvo_gshard.wings.profiling.files import COMPARISON, SUMMARY, ProfileFiles
from lingvo_gshard.wings.profiling.profile import (
    CollectiveTime,
    DeviceTime,
    LayerTime,
    OperationTime,
    PartTime,
    Profile,
    Rate,
)
from lingvo_gshard.wings.profiling.timeline import StepRange
from lingvo_gshard.wings.services.roll_back import ROLL_BACKS_FILE, RollBack
from lingvo_gshard.wings.services.routers.router_records import ROUTERS_FILE, RouterRecord

LAYERS = ("encoder.layers[1].feed_forward", "decoder.layers[1].feed_forward")
SPIKES = (77, 300)
HOSTILE = "<script>window.harmed = true</script><img src=x onerror='window.harmed=1'>"
_START = 1_700_000_000.0


def metrics(step: int, steps: int, seed: int = 0) -> dict[str, float]:
    """Returns a row of metrics that a run could have."""
    noise = np.random.default_rng([seed, step])
    loss = 2.0 + 6.0 * math.exp(-step / 90) + 0.1 * noise.standard_normal()
    is_spike = step in SPIKES
    row = {
        "step": step,
        "loss": 30.0 if is_spike else loss,
        "perplexity": math.exp(loss),
        "accuracy": min(0.7, step / 500),
        "gradient_norm": 50.0 if is_spike else 1.0 + 0.2 * noise.random(),
        "learning_rate": 0.004 * min(step / 100, (steps - step + 1) / (steps - 99)),
        "tokens": 4000.0,
        "tokens_per_second": 9000.0 + 100 * noise.random(),
        "host_memory_bytes": 2.0e9 + 1e5 * step,
        "peak_device_memory_bytes": 5.0e8,
        "spike": float(is_spike),
        "spikes": float(sum(spike <= step for spike in SPIKES)),
    }
    for layer in LAYERS:
        row[f"{layer}/dropped_share"] = 0.3 / (1 + step / 50)
        row[f"{layer}/load_max_over_mean"] = 1 + 2 / (1 + step / 50)
        row[f"{layer}/dead_experts"] = 0.0
    if step % 50 == 0:
        row |= {"dev/loss": loss + 0.2, "dev/perplexity": math.exp(loss + 0.2)}
    return row


def write_run(
    directory: pathlib.Path,
    steps: int = 400,
    seed: int = 1,
    experiment: str = "test.example",
    **rows: dict,
) -> pathlib.Path:
    """Writes all files that a report reads, and returns the directory.

    Args:
      directory: the directory of the run.
      steps: number of its steps.
      seed: `step.seed`.
      experiment: name of the experiment.
      **rows: `step_N={...}` updates the row of step N.
    """
    directory.mkdir(parents=True)
    params = {"name": repr(experiment), "step.seed": seed, "step.spikes.policy": "'warn'"}
    params["run.steps"] = steps
    text = "".join(f"{path} : {value}\n" for path, value in params.items())
    (directory / "params.txt").write_text(text, encoding="utf-8")
    with open(directory / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            row = metrics(step, steps, seed) | rows.get(f"step_{step}", {})
            file.write(json.dumps(row) + "\n")
    _write_programs(directory)
    for step in (0, 200):
        run_records.append_launch(directory, _launch(step, steps, experiment))
    run_records.write_sharding(directory, _sharding())
    run_records.append_evaluation(directory, _evaluation(steps))
    run_records.append_row(directory / ROLL_BACKS_FILE, _roll_back())
    profile = ProfileFiles(directory, StepRange(20, 23))
    profile.path.mkdir(parents=True)
    profile.write(SUMMARY, _profile())
    profile.write(COMPARISON, _comparison())
    with open(directory / ROUTERS_FILE, "wb") as file:
        for step in range(50, steps + 1, 50):
            for layer in LAYERS:
                file.write(msgspec.json.encode(routers(step, layer)) + b"\n")
    return directory


def _write_programs(directory: pathlib.Path) -> None:
    memory = {"arguments": 100, "outputs": 90, "temporaries": 300, "code": 0, "peak": 400}
    times = {"tracing": 1.0, "lowering": 0.5, "compiling": 2.0, "is_cached": False}
    programs = [
        {"step": 1, "function": "train", "inputs": {"ids": "int32[8,16]"}, "memory": memory},
        {"step": 50, "function": "eval", "inputs": {"ids": "int32[8,16]"}},
        {"step": 120, "function": "train", "inputs": {"ids": "int32[8,24]"}, "memory": memory},
        {"step": 201, "function": "train", "inputs": {"ids": "int32[8,16]"}, "memory": memory},
    ]
    lines = [json.dumps(program | times) + "\n" for program in programs]
    (directory / "compilations.jsonl").write_text("".join(lines), encoding="utf-8")


def _launch(step: int, steps: int, experiment: str) -> Launch:
    return Launch(
        time=_START + step,
        step=step,
        steps=steps,
        experiment=experiment,
        command=f"gshard-train --experiment='{experiment}' --logdir=run",
        directory="/home/a",
        host="host",
        processes=1,
        runtime="spmd",
        devices="4 CPU devices as data=2,model=2",
        parameters=3_270_912,
        active_parameters=1_698_048,
        versions={"python": "3.11.7", "jax": "0.10.2"},
        environment={"XLA_FLAGS": "--xla_a=1"},
    )


def _sharding() -> Sharding:
    rows = []
    for stack in ("encoder", "decoder"):
        rows += [
            (f"{stack}.embedding.table", "VM", (64, 8), "V over model (2)", 2),
            (f"{stack}.layers[0].self_attention.w_out", "NDM", (4, 2, 8), "N over model (2)", 2),
            (
                f"{stack}.layers[1].feed_forward.experts.w_in",
                "EMH",
                (4, 8, 16),
                "E over data (2), H over model (2)",
                4,
            ),
            (f"{stack}.final_norm.bias", "M", (8,), "replicated", 1),
        ]
    tensors = [
        TensorSharding(path + slot, kind, layout, shape, "float32", split, size, size // parts)
        for path, layout, shape, split, parts in rows
        for size in [4 * math.prod(shape)]
        for kind, slot in (("weights", ""), ("moments", "/first_moment"))
    ]
    return Sharding("data=2,model=2", 4, "expert_tensor", "weights: E->data", tensors)


def _evaluation(steps: int) -> EvaluationRow:
    languages = {
        name: {
            "rows": 40,
            "translated": {"chrf": chrf, "bleu": chrf / 2},
            "copied": {"chrf": 20.0, "bleu": 3.0},
            "shuffled": {"chrf": 15.0, "bleu": 1.0},
        }
        for name, chrf in (("es", 52.5), ("de", 41.0), ("gl", 36.5))
    }
    average = {"translated": {"chrf": 43.3, "bleu": 21.7}}
    scores = {"perplexity": 7.75, "accuracy": 0.61, "languages": languages, "average": average}
    return EvaluationRow(_START, steps, "test", "trained", "120 rows", {"beam_size": 1}, scores)


def routers(step: int, layer: str) -> RouterRecord:
    """Returns a record of a layer whose last expert is dead."""
    choices = [300 + step, 200, 100, 0]
    return RouterRecord(
        step=step,
        layer=layer,
        router="Top2Router",
        experts_per_token=2.0,
        tokens=sum(choices) // 2,
        choices=choices,
        kept=choices,
        dropped_share=0.1,
        load_entropy=0.9,
        balance_loss=0.3,
        balance_floor=0.25,
        dead_since={3: 50},
        by_language={"es": [100, 0, 0, 0], "de": [0, 60, 20, 0]},
        by_class={"digits": [1, 1, 1, 1]},
    )


def _roll_back() -> RollBack:
    return RollBack(310, 301, 300, 200, 301, 310, {"loss": 30.0, "gradient_norm": 50.0})


def _profile() -> Profile:
    times = {
        "products": 0.08,
        "attention": 0.03,
        "routing and dispatch": 0.02,
        "collectives": 0.04,
        "optimizer": 0.01,
        "input wait": 0.02,
    }
    total = sum(times.values())
    return Profile(
        name="test.example",
        first_step=20,
        last_step=23,
        device_summary="4 CPU devices as data=2,model=2",
        chip="cpu",
        devices=4,
        mesh="data=2,model=2",
        seconds_per_step=total,
        tokens_per_step=4000,
        busy_cores=1.5,
        cores=2,
        useful_flops=2_000_000_000,
        executed_flops=3_000_000_000,
        attainable=Rate(flops_per_second=5e10, source="measured"),
        parts=[
            PartTime(part=part, seconds=time, share=time / total, flops=0, flops_per_second=None)
            for part, time in times.items()
        ],
        layers=[
            LayerTime(layer=layer, phase="forward", seconds=0.05, share=0.25, flops=10**9)
            for layer in LAYERS
        ],
        slowest=[_operation()],
        collectives=[
            CollectiveTime(
                kind="all-to-all",
                axis="data",
                count=4,
                bytes=4096,
                seconds=0.04,
                hidden_seconds=0.01,
                exposed_seconds=0.03,
            )
        ],
        per_device=[DeviceTime(device=0, seconds=times)],
        findings=["The input took 10 % of the step."],
    )


def _comparison() -> Comparison:
    rows = [("products", 0.05, 0.08), ("attention", 0.03, 0.03), ("collectives", 0.01, 0.04)]
    layers = [(LAYERS[0], "forward", 0.04, 0.05), (LAYERS[1], "backward", 0.06, 0.09)]
    return Comparison(
        predicted=0.12,
        measured=0.2,
        kinds=[
            PartComparison(part=part, phase="", predicted=predicted, measured=measured)
            for part, predicted, measured in rows
        ],
        layers=[
            PartComparison(part=part, phase=phase, predicted=predicted, measured=measured)
            for part, phase, predicted, measured in layers
        ],
    )


def _operation() -> OperationTime:
    return OperationTime(
        name="dot.1",
        opcode="dot",
        kind="products",
        layer=LAYERS[1],
        phase="backward",
        seconds=0.05,
        active_seconds=0.06,
        executions=1.0,
        flops=10**9,
        op_name="einsum",
        source="feed_forward.py:31",
    )
