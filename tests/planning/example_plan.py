"""Makes a consistent plan of the paper's MoE(512E, 12L), as JSON and as a Plan."""

import copy
import math
import re

import msgspec

from lingvo_gshard.wings.planning.plan.plan import Plan

TOPOLOGY = "v3:16x16"
CAPACITY = 16 * 2**30
SIZES = {"E": 512, "M": 1024, "H": 8192, "N": 16, "D": 128, "V": 64_000, "R": 3}
RULES = {
    "expert": {"E": ["data"]},
    "fsdp": {"M": ["data"]},
    "expert_tensor": {"E": ["data"], "H": ["model"], "N": ["model"], "V": ["model"]},
    "expert_tensor_fsdp": {"E": ["fsdp", "data"], "M": ["fsdp"], "H": ["model"], "N": ["model"]},
}
MESHES = {
    "expert": "data=512",
    "fsdp": "data=512",
    "expert_tensor": "data=64,model=8",
    "expert_tensor_fsdp": "fsdp=8,data=16,model=4",
}
PEAK_FLOPS = 61.5e12
TOKENS = 2**20
HOSTILE = "<script>window.harmed = true</script><img src=x onerror='window.harmed = true'>"

# Fields that plans of earlier versions lack, and their defaults.
_OF_EARLIER_VERSIONS = {"goodput": None, "loads": None, "params": ""}
_ATTENTION = {"query": "MND", "key": "MND", "value": "MND", "output": "NDM"}
_SUBLAYERS = {
    "self_attention": _ATTENTION,
    "cross_attention": _ATTENTION,
    "feed_forward": {"w_in": "MH", "w_out": "HM"},
    "moe": {"router.w": "ME", "w_in": "EMH", "w_out": "EHM"},
}


def as_plan(record: dict) -> Plan:
    """Returns the plan that a file with this JSON holds."""
    return msgspec.convert(record, Plan)


def example_plan(strategy: str = "expert") -> dict:
    """Returns the JSON of a new plan of a 12-layer model on 512 cores, in loops of three."""
    mesh = {name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", MESHES[strategy])}
    tensors = _tensors(RULES[strategy], mesh)
    collectives = _collectives()
    layers = _layers(collectives)
    memory = _memory(tensors)
    seconds = sum(row["seconds"] for row in layers)
    moving = sum(row["communication_seconds"] for row in layers)
    bound = max(sum(row["seconds_bound"] for row in layers) - moving, moving)
    flops = _flops(layers)
    total = sum(math.prod(row["shape"]) for row in tensors if row["kind"] == "weights")
    return _OF_EARLIER_VERSIONS | {
        "format": 2,
        "name": "gshard_paper.moe_512e_12l",
        "topology": TOPOLOGY,
        "chip": "TPU v3",
        "devices": 512,
        "compiler": "tpu",
        "mesh": MESHES[strategy],
        "strategy": "activations: B,G,E->data | weights: E->data | moments: E->data",
        "strategy_name": strategy,
        "partitioner": "gspmd",
        "fits": memory["peak"] <= CAPACITY,
        "bytes_per_device": memory,
        "parameters": {"total": total, "active": 492_000_000},
        "tensors": tensors,
        "largest_temporaries": _temporaries(),
        "collectives": collectives,
        "host_transfers": [],
        "flops": flops,
        **_by_layer_and_kind(layers),
        "seconds_per_step": seconds,
        "seconds_per_step_bound": bound,
        "steps_per_second": 1 / seconds,
        "steps_per_second_bound": 1 / bound,
        "tokens_per_step": TOKENS,
        "tokens_per_second": TOKENS / seconds,
        "mfu": flops["useful"] / (PEAK_FLOPS * seconds),
        "budget": {
            "tokens": 1_000_000_000_000,
            "chip_hours": 1e12 / TOKENS * seconds / 3600 * 256,
            "kilowatt_hours": 1e12 / TOKENS * seconds / 3600 * 256 * 0.45,
            "price": 1e12 / TOKENS * seconds / 3600 * 256 * 2.2,
            "currency": "USD",
            "sources": ["a chip's price per hour: flag --price_per_chip_hour"],
        },
        "remedies": [],
        "change": "",
        "compile_seconds": 21.4,
        "versions": {"lingvo_gshard": "0.1.0", "jax": "0.10.2", "libtpu": "0.0.42.1"},
        "notes": ["decoder.embedding: V of 32000 does not divide by 512: padded"],
    }


def _flops(layers: list[dict]) -> dict[str, int]:
    useful = sum(row["flops"] for row in layers if row["phase"] in ("forward", "backward"))
    again = sum(row["flops"] for row in layers if row["phase"] == "rematerialized")
    return {
        "useful": int(useful * 0.93),
        "executed": int((useful + again) * 1.02),
        "rematerialized": int(again),
        "dispatch": int(useful * 0.04),
        "optimizer": 0,
        "padding": int(useful * 0.03),
    }


def too_large() -> dict:
    """Returns a plan that exceeds memory, with suggested changes."""
    plan = example_plan()
    memory = plan["bytes_per_device"]
    memory["activations"] += 14 * 2**30
    memory["peak"] += 14 * 2**30
    plan["fits"] = False
    plan["remedies"] = [
        {"change": '`task.rematerialization = "layer"`', "fits": True}
        | {"peak": 9 * 2**30, "seconds_per_step": 0.41},
        {"change": "`input.batch_rows = 4096`", "fits": False}
        | {"peak": 17 * 2**30, "seconds_per_step": 0.19},
    ]
    return plan


def hostile() -> dict:
    """Returns a plan whose text a page without escaping would execute."""
    plan = copy.deepcopy(example_plan())
    plan["name"] = plan["topology"] = HOSTILE
    plan["layers"][0]["layer"] = HOSTILE
    plan["tensors"][0]["path"] = HOSTILE
    plan["collectives"][0]["layer"] = HOSTILE
    plan["notes"] = [
        HOSTILE,
        "</script><script>window.harmed = true</script>",
        "\u2028\u2029 {{SCRIPT}}",
    ]
    plan["versions"][HOSTILE] = HOSTILE
    return plan


def _tensors(rules: dict, mesh: dict) -> list[dict]:
    rows = []
    for stack, attentions in (("encoder", ("self",)), ("decoder", ("self", "cross"))):
        rows += _pair(f"{stack}.embedding.table", "VM", rules, mesh)
        for position, last in enumerate(("feed_forward", "moe")):
            for name in (*(f"{kind}_attention" for kind in attentions), last):
                for weight, layout in _SUBLAYERS[name].items():
                    path = f"{stack}.layers.body[{position}].{name}.{weight}"
                    rows += _pair(path, "R" + layout, rules, mesh)
    return rows


def _pair(path: str, layout: str, rules: dict, mesh: dict) -> list[dict]:
    """Returns a weight and its two factored Adafactor moments."""
    return [
        _tensor(path, "weights", layout, rules, mesh),
        _tensor(f"{path}/row", "moments", layout[:-1], rules, mesh),
        _tensor(f"{path}/column", "moments", layout[:-2] + layout[-1], rules, mesh),
    ]


def _tensor(path: str, kind: str, layout: str, rules: dict, mesh: dict) -> dict:
    sizes = [SIZES[letter] for letter in layout]
    split, parts, claimed = [], 1, set()
    for letter, size in zip(layout, sizes, strict=True):
        axes = [axis for axis in rules.get(letter, ()) if axis not in claimed]
        cut = math.prod(mesh[axis] for axis in axes)
        if axes and size % cut == 0:
            split.append(f"{letter}->{','.join(axes)}")
            parts *= cut
            claimed.update(axes)
    size = 4 * math.prod(sizes)
    layer = (
        path.partition("/")[0]
        .rpartition(".")[0]
        .replace(".", "/")
        .replace("[", "_")
        .replace("]", "")
    )
    return {
        "path": path, "kind": kind, "layer": layer, "layout": layout, "shape": sizes,
        "dtype": "float32", "split": "; ".join(split), "bytes": size,
        "bytes_per_device": size // parts, "note": "",
    }  # fmt: skip


def _memory(tensors: list[dict]) -> dict:
    held = {
        kind: sum(row["bytes_per_device"] for row in tensors if row["kind"] == kind)
        for kind in ("weights", "moments")
    }
    classes = held | {"activations": 2_380_000_000, "inputs": 65_536, "program": 41_000_000}
    peak = sum(classes.values()) + 96_000_000
    return classes | {"peak": peak, "capacity": CAPACITY, "host": 0}


def _by_layer_and_kind(layers: list[dict]) -> dict:
    """Returns the rows, and those of kinds of work; each layer is taken for one kind."""
    kinds: dict[str, dict] = {}
    for row in layers:
        kind = "attention" if "attention" in row["layer"] else "products"
        total = kinds.setdefault(
            kind, {"kind": kind, "flops": 0, "seconds_bound": 0.0, "seconds": 0.0}
        )
        for name in ("flops", "seconds_bound", "seconds"):
            total[name] += row[name]
    rest = {"is_calibrated": False, "has_code": True}
    return {"layers": layers, "kinds": list(kinds.values()), **rest}


def _layers(collectives: list[dict]) -> list[dict]:
    both = ("self_attention", "cross_attention")
    backward = ("rematerialized", "backward")
    order = [
        ("encoder/embedding", "forward", 1), *_loop("encoder", both[:1], ("forward",)),
        ("decoder/embedding", "forward", 1), *_loop("decoder", both, ("forward",)),
        ("decoder/softmax", "forward", 1), ("decoder/softmax", "backward", 1),
        *_loop("decoder", both, backward), ("decoder/layers", "backward", 1),
        ("decoder/embedding", "backward", 1), *_loop("encoder", both[:1], backward),
        ("encoder/layers", "backward", 1), ("encoder/embedding", "backward", 1),
        ("optimizer", "optimizer", 1), ("", "other", 1),
    ]  # fmt: skip
    return [_layer(*row, collectives) for row in order]


def _loop(stack: str, attentions: tuple, phases: tuple) -> list[tuple]:
    rows = []
    for phase in phases:
        inner = [
            (f"{stack}/layers/body_{position}/{name}", phase, 3)
            for position, last in enumerate(("feed_forward", "moe"))
            for name in (*attentions, last)
        ]
        rows += inner[::-1] if phase == "backward" else inner
    return rows


def _layer(layer: str, phase: str, times: int, collectives: list[dict]) -> dict:
    """Returns the time of all executions of a layer in one step."""
    last = layer.rpartition("/")[2]
    tokens = TOKENS / 512
    products = {
        "moe": 2 * 2 * 2 * 1024 * 8192, "feed_forward": 2 * 2 * 1024 * 8192,
        "softmax": 2 * 1024 * 32_000, "self_attention": 2 * 4 * 1024 * 2048 + 4 * 1024 * 2048,
        "cross_attention": 2 * 4 * 1024 * 2048 + 4 * 1024 * 2048,
    }  # fmt: skip
    flops = tokens * times * products.get(last, 1000) * (2 if phase == "backward" else 1)
    traffic = {"optimizer": 2.2e9, "": 4e8, "embedding": 2e8}.get(last, times * 2.6e8)
    compute, memory = flops / PEAK_FLOPS, traffic / 450e9
    calls = [row for row in collectives if (row["layer"], row["phase"]) == (layer, phase)]
    moving = sum(row["seconds_bound"] for row in calls)
    return {
        "layer": layer, "phase": phase, "times": times, "flops": int(flops), "bytes": int(traffic),
        "seconds_bound": max(compute, memory) + moving,
        "seconds": max(compute / 0.8, memory / 0.9) + sum(row["seconds"] for row in calls),
        "compute_seconds": compute, "memory_seconds": memory, "communication_seconds": moving,
    }  # fmt: skip


def _collectives() -> list[dict]:
    rows = []
    for stack in ("encoder", "decoder"):
        for phase in ("forward", "rematerialized", "backward"):
            moe = f"{stack}/layers/body_1/moe"
            rows.append(_collective("all-to-all", moe, phase, "float32", 8_388_608, 6, 1.29e-3))
        rows.append(
            _collective(
                "all-reduce", f"{stack}/layers", "backward", "float32", 33_554_432, 12, 5.9e-4
            )
        )
        rows.append(
            _collective(
                "all-reduce", f"{stack}/embedding", "backward", "float32", 262_144_000, 1, 4.6e-3
            )
        )
    rows.append(_collective("all-gather", "", "other", "int32", 4096, 2, 2e-5))
    total = sum(row["seconds"] for row in rows)
    return [row | {"share": row["seconds"] / total} for row in rows]


def _collective(kind, layer, phase, dtype, size, count, seconds) -> dict:
    return {
        "kind": kind, "axis": "data", "layer": layer, "phase": phase, "dtype": dtype,
        "bytes": size, "count": count, "seconds_bound": count * seconds * 0.7,
        "seconds": count * seconds, "hidden_seconds": 0.0, "line": "",
    }  # fmt: skip


def _temporaries() -> list[dict]:
    rows = [
        ("fusion.1283", "decoder/softmax", [2048, 32_000], 262_144_000),
        ("all-to-all.42", "encoder/layers/body_1/moe", [512, 1, 8, 1024], 16_777_216),
        ("while.7", "encoder/layers", [3, 2048, 1024], 25_165_824),
        (
            "convolution.12",
            "decoder/layers/body_0/cross_attention",
            [2, 16, 1024, 1024],
            134_217_728,
        ),
    ]
    return [
        {"name": name, "layer": layer, "shape": shape, "dtype": "float32", "bytes": size}
        for name, layer, shape, size in rows
    ]
