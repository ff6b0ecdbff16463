"""Plans the newest families at their full width: the first layers of a model on eight devices.

    python -m docs.planned.families --family=glm-5 --machine=v5p

plans a row anew and keeps it in families.jsonl; `python -m docs.planned` writes the page. With
`all`, rows that are kept are not planned again. A row takes two to ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import tempfile
from collections.abc import Mapping
from typing import Any

import msgspec

import lingvo_gshard
from docs.counted import __main__ as counted
from docs.planned import cells
from docs.planned.cells import Cell
from docs.planned.choices import ALL, chosen
from docs.planned.setups import TRAINED_LENGTH
from lingvo_gshard.wings.planning.experiments import PlanOptions, plan_experiment
from lingvo_gshard.wings.planning.machines import topologies

RESULTS = pathlib.Path(__file__).parent / "families.jsonl"
# Eight GPUs, and eight TPUs, which are called v5p-16 by their cores.
MACHINES = {"h100": "gpu:h100:1x8", "v5p": "v5p:2x2x2"}
WORK = "first layers"
_DEVICES = 8


@dataclasses.dataclass(frozen=True)
class Family:
    """A row of the table.

    Attributes:
      key: what the command calls it.
      name: what the table calls it.
      config: the name of its config in docs/counted/configs.jsonl.
      layers: how many of its first layers are planned: at least one of each kind.
      has_experts: whether it has experts.
    """

    key: str
    name: str
    config: str
    layers: int = 4
    has_experts: bool = True

    @functools.cached_property
    def values(self) -> dict[str, Any]:
        """The config of the whole model."""
        return next(each for each in counted.entries() if each["name"] == self.config)["config"]

    @property
    def depth(self) -> int:
        """How many layers the whole model has."""
        return self.values.get("text_config", self.values)["num_hidden_layers"]


FAMILIES = (
    Family(
        "ministral-3",
        "Ministral 3 (Devstral Small 2)",
        "mistralai/Devstral-Small-2-24B-Instruct-2512",
        has_experts=False,
    ),
    Family("glm-5", "GLM-5", "zai-org/GLM-5"),
    Family("deepseek-v4", "DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Flash"),
    Family("gemma-4", "Gemma 4 31B", "nvidia/Gemma-4-31B-IT-NVFP4", 6, has_experts=False),
    Family("gemma-4-experts", "Gemma 4 26B-A4B", "google/gemma-4-26B-A4B", 6),
    Family("kimi-linear", "Kimi Linear 48B-A3B", "moonshotai/Kimi-Linear-48B-A3B-Instruct"),
    Family("kimi-k2", "Kimi K2", "moonshotai/Kimi-K2-Instruct", 2),
    Family("nemotron-h", "Nemotron-H 56B", "nvidia/Nemotron-H-56B-Base-8K", 9, has_experts=False),
    Family("nemotron-3", "Nemotron 3 Nano", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 7),
    Family("granite-4", "Granite 4.0 H Small", "ibm-granite/granite-4.0-h-small", 6),
    Family("qwen3-next", "Qwen3-Next 80B-A3B", "Qwen/Qwen3-Next-80B-A3B-Instruct"),
    Family("minimax-m2", "MiniMax-M2.5", "MiniMaxAI/MiniMax-M2.5"),
    Family("mimo-v2", "MiMo-V2-Flash", "XiaomiMiMo/MiMo-V2-Flash"),
)


def first_layers(values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Returns a config with the first layers alone: lists that say something of each are cut."""
    if "text_config" in values:
        return {**values, "text_config": first_layers(values["text_config"], layers)}
    depth = values["num_hidden_layers"]
    cut = {
        key: value[:layers] if _is_of_layers(key, value, depth) else value
        for key, value in values.items()
    }
    if "linear_attn_config" in cut:
        cut["linear_attn_config"] = {
            key: [each for each in value if each <= layers] if isinstance(value, list) else value
            for key, value in cut["linear_attn_config"].items()
        }
    return cut | {"num_hidden_layers": layers}


def _is_of_layers(key: str, value: object, depth: int) -> bool:
    is_pattern = isinstance(value, str) and key == "hybrid_override_pattern"
    return is_pattern or (isinstance(value, list) and len(value) >= depth)


def make(family: Family, machine: str) -> Cell:
    """Returns the row of a family on a machine: a row of tokens for each device, full remat."""
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder) / "config.json"
        config.write_text(json.dumps(first_layers(family.values, family.layers)), encoding="utf-8")
        params = lingvo_gshard.open_model(
            config,
            length=TRAINED_LENGTH,
            precision="bfloat16",
            rows=_DEVICES,
            settings=['task.decoder.execution.rematerialize = "full"'],
        )
    topology = topologies.get(MACHINES[machine])
    strategy = "expert_fsdp" if family.has_experts else "fsdp"
    mesh = f"data={_DEVICES}"
    options = PlanOptions(mesh=mesh, strategy=strategy, tokens=cells.BILLION)
    plan = plan_experiment(params, topology, options)
    assert plan.budget
    cell = Cell(model=family.key, machine=machine, work=WORK, mesh=mesh, strategy=strategy)
    return msgspec.structs.replace(cell, **cells.facts_of(plan, plan.budget, topology))


def load() -> dict[tuple[str, str, str], Cell]:
    """Returns the rows that are kept, by what they are about."""
    return cells.read(RESULTS, Cell)


def main() -> None:
    """Plans what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.planned.families",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--family", default=ALL, help="such as glm-5, or all")
    parser.add_argument("--machine", default=ALL, help="h100, v5p or all")
    given = parser.parse_args()
    # One process plans TPUs and GPUs.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    families = {each.key: each for each in FAMILIES}
    for family in chosen("family", given.family, families):
        for machine in chosen("machine", given.machine, {name: name for name in MACHINES}):
            is_named = ALL not in (given.family, given.machine)
            if is_named or (family.key, machine, WORK) not in load():
                print(family.key, machine, flush=True)
                cell = make(family, machine)
                cells.save((load() | {cell.key: cell}).values(), RESULTS)


if __name__ == "__main__":
    main()
