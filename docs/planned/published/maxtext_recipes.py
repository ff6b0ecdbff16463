"""Published measurements of MaxText's recipes for TPUs, and how each is planned."""

from __future__ import annotations

from docs.planned.published import decoders
from docs.planned.published.decoders import Decoder, Mixture
from docs.planned.published.training import Training
from lingvo_gshard.wings.planning.machines import topologies

_RECIPES = "https://github.com/AI-Hypercomputer/tpu-recipes/tree/main/training"
# What a layer keeps in the memory of the host: its input, with projections of attention or without.
_INPUTS, _PROJECTIONS = "full_offloaded", "products_but_hidden_offloaded"
_ON_CHIP = "products_but_hidden"
_ON_HOST = (
    "what the policy saves of a layer is on the host: its input, and the products that the "
    "original keeps there"
)
_IN_16_BITS = f"{_ON_HOST}; weights and moments in bfloat16, as in the original"
# The table of all recipes for TPU7x.
_IRONWOOD = "ironwood"
_MOMENT = "both moments in float32, where the first one of the original has 16 bits"
_SUMS_IN_FUSIONS = "xla_tpu_enable_async_collective_fusion_fuse_all_reduce"
_SPLIT_EXPERTS = "experts split over 8 chips, where the original gathers all experts of a layer"


def _recipe(
    name: str,
    decoder: Decoder | Mixture,
    topology: str,
    recipe: str,
    rows: int,
    tokens: float,
    planned: str,
    *,
    length: int = 8192,
    policy: str = _PROJECTIONS,
    mesh: str = "",
    term: str = "",
    is_half: bool = False,
    precision: str = "bfloat16",
    passes: int = 1,
    compile_options: tuple[str, ...] = (),
) -> Training:
    """Returns a row with `rows` for each device, and FSDP over all unless a mesh is given."""
    chips = topologies.get(topology).devices
    name = f"{name} FP8" if precision == "fp8" else name
    return Training(
        key=f"maxtext {name.lower().replace(' ', '-')} {topology}",
        name=name,
        publisher="MaxText",
        source=f"{_RECIPES}/{recipe}",
        decoder=decoder,
        topology=topology,
        mesh=mesh or f"data={chips}",
        strategy="expert_fsdp" if mesh else "fsdp",
        rows=rows * chips,
        length=length,
        rematerialize=policy,
        precision="bfloat16_weights" if is_half else precision,
        tokens=tokens,
        planned=planned,
        settings=('step.optimizer.moment_dtype = "bfloat16"',) if is_half else (),
        term=term,
        passes=passes,
        compile_options=compile_options,
    )


_7B, _8B = decoders.MISTRAL_7B, decoders.LLAMA_3_8B
_70B, _2_70B = decoders.LLAMA_3_70B, decoders.LLAMA_2_70B
_405B = decoders.LLAMA_3_405B
_LLAMA_2 = "trillium/Llama2-70B-MaxText"
_LLAMA_8B, _LLAMA_70B = "trillium/Llama3.1-8B-MaxText", "trillium/Llama3.1-70B-MaxText"

TRAININGS = (
    _recipe("Llama 3.1 8B", _8B, "v6e:2x4", f"{_LLAMA_8B}/v6e-8", 3, 7138.9, _ON_HOST),
    _recipe("Llama 3.1 8B", _8B, "v6e:16x16", f"{_LLAMA_8B}/v6e-256", 4, 7207.3, _ON_HOST),
    _recipe("Mistral 7B", _7B, "v6e:2x4", "trillium/Mistral-7B-MaxText", 6, 7776.8, _ON_HOST),
    _recipe(
        "Llama 3.1 70B", _70B, "v6e:4x8", f"{_LLAMA_70B}/v6e-32", 2, 921, _IN_16_BITS, is_half=True
    ),
    _recipe("Llama 3.1 70B", _70B, "v6e:16x16", f"{_LLAMA_70B}/v6e-256", 5, 960.2, _ON_HOST),
    # Its log has 8,192 tokens of a chip in a step.
    _recipe("Llama 2 70B", _2_70B, "v6e:16x16", _LLAMA_2, 2, 905, _ON_HOST, length=4096),
    _recipe(
        "DeepSeek-V3",
        decoders.DEEPSEEK_V3,
        "v5p:8x8x8",
        "v5p/DeepSeek3-671B-MaxText",
        6,
        542.1,
        f"{_SPLIT_EXPERTS}; two micro-batches; without the compiler's option "
        f"`{_SUMS_IN_FUSIONS}`, with which libtpu finds no room in the memory of a core",
        policy=_INPUTS,
        mesh="fsdp=64,data=8",
        passes=2,
        compile_options=(f"{_SUMS_IN_FUSIONS}=",),
    ),
    _recipe(
        "Llama 4 Scout",
        decoders.LLAMA_4_SCOUT,
        "v5p:8x8x8",
        "v5p/Llama4-Scout-17B-16E-Maxtext",
        8,
        2070.5,
        "",
        policy=_INPUTS,
    ),
    _recipe(
        "Llama 4 Maverick",
        decoders.LLAMA_4_MAVERICK,
        "v5p:4x4x8",
        "v5p/Llama4-Maverick-17B-128E-Maxtext",
        4,
        1321.7,
        f"{_SPLIT_EXPERTS}; heads and H whole, where the original splits them over 4 chips",
        policy=_INPUTS,
        mesh="fsdp=16,data=8",
        term=(
            "the original gathers all experts of 24 layers in three passes, 8 GB for each chip "
            "and layer: 1.5 to 3 s of the 10.6 s between the two steps, at 200 to 400 GB/s; the "
            "rest is not explained"
        ),
    ),
    _recipe(
        "Mixtral 8x7B",
        decoders.MIXTRAL_8X7B_DROPPED,
        "v6e:16x16",
        "trillium/Mixtral-8x7B-MaxText",
        12,
        3645.2,
        "",
        length=4096,
    ),
    _recipe(
        "Mixtral 8x22B",
        decoders.MIXTRAL_8X22B_DROPPED,
        "v6e:16x16",
        "trillium/Mixtral-8x22B-MaxText",
        8,
        1326.3,
        "weights and moments in float32, where the original has 16 bits",
        length=4096,
        mesh="fsdp=64,data=4",
    ),
    _recipe("Llama 3.1 70B", _70B, "tpu7x:4x4x4", _IRONWOOD, 2, 2687, _MOMENT, policy=_ON_CHIP),
    _recipe(
        "Llama 3.1 70B",
        _70B,
        "tpu7x:4x4x4",
        _IRONWOOD,
        2,
        4127.6,
        _MOMENT,
        policy=_ON_CHIP,
        precision="fp8",
    ),
    _recipe("Llama 3.1 70B", _70B, "tpu7x:4x8x8", _IRONWOOD, 2, 2670.6, _MOMENT, policy=_ON_CHIP),
    _recipe("Llama 3.1 405B", _405B, "tpu7x:4x8x8", _IRONWOOD, 3, 499.8, _MOMENT, policy=_INPUTS),
    _recipe(
        "Qwen3 235B-A22B",
        decoders.QWEN_3_235B,
        "tpu7x:4x8x8",
        _IRONWOOD,
        16,
        4245.9,
        "",
        length=4096,
        policy=_INPUTS,
        term=(
            "the plan hides the gathers of all experts, 4.8 GB for each layer and pass, behind "
            "products; whether the original's step waits for them is not published"
        ),
    ),
    _recipe(
        "gpt-oss 120B",
        decoders.GPT_OSS_120B,
        "tpu7x:4x4x4",
        _IRONWOOD,
        10,
        9581.7,
        "weights split over all devices, where the original has two replicas of 64 devices",
        policy=_INPUTS,
        term=(
            "the original keeps outputs of experts on the host, up to 68 GB for each device and "
            "direction, and computes windows of 128 in blocks of 1,024 and 2,048, where ours are "
            "of 512; neither time is published"
        ),
    ),
)
