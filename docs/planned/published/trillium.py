"""Published measurements of dense trainings on v6e, and how each is planned.

They are MaxText's recipes, with rows of 8,192 positions unless said otherwise.
"""

from __future__ import annotations

from docs.planned.published import decoders
from docs.planned.published.decoders import Decoder
from docs.planned.published.training import Training

_RECIPES = "https://github.com/AI-Hypercomputer/tpu-recipes/tree/main/training/trillium"
_ON_HOST = (
    "what the policy saves of a layer is on the host: its input, and the products that the "
    "original keeps there"
)
_HALF = "; weights and moments in bfloat16, as in the original"


def _dense(
    name: str,
    decoder: Decoder,
    topology: str,
    chips: int,
    recipe: str,
    rows: int,
    tokens: float,
    length: int = 8192,
    is_half: bool = False,
) -> Training:
    """Returns a row with FSDP over all chips, and `rows` for each of them."""
    return Training(
        key=f"maxtext {name.lower().replace(' ', '-')} {topology}",
        name=name,
        publisher="MaxText",
        source=f"{_RECIPES}/{recipe}",
        decoder=decoder,
        topology=topology,
        mesh=f"data={chips}",
        strategy="fsdp",
        rows=rows * chips,
        length=length,
        rematerialize="products_but_hidden_offloaded",
        precision="bfloat16_weights" if is_half else "bfloat16",
        tokens=tokens,
        planned=_ON_HOST + (_HALF if is_half else ""),
        settings=('step.optimizer.moment_dtype = "bfloat16"',) if is_half else (),
    )


_8B, _70B = decoders.LLAMA_3_8B, decoders.LLAMA_3_70B

TRAININGS = (
    _dense("Llama 3.1 8B", _8B, "v6e:2x4", 8, "Llama3.1-8B-MaxText/v6e-8", 3, 7138.9),
    _dense("Llama 3.1 8B", _8B, "v6e:16x16", 256, "Llama3.1-8B-MaxText/v6e-256", 4, 7207.3),
    _dense("Mistral 7B", decoders.MISTRAL_7B, "v6e:2x4", 8, "Mistral-7B-MaxText", 6, 7776.8),
    _dense(
        "Llama 3.1 70B", _70B, "v6e:4x8", 32, "Llama3.1-70B-MaxText/v6e-32", 2, 921, is_half=True
    ),
    _dense("Llama 3.1 70B", _70B, "v6e:16x16", 256, "Llama3.1-70B-MaxText/v6e-256", 5, 960.2),
    # Its log has 8,192 tokens of a chip in a step.
    _dense(
        "Llama 2 70B", decoders.LLAMA_2_70B, "v6e:16x16", 256, "Llama2-70B-MaxText", 2, 905, 4096
    ),
)
