"""Published models: their configs, as data in configs/, and how many parameters they have.

A config holds the values of the published config.json that its family reads. What describes the
packing of the published tensors (`quantization_config` of DeepSeek-V3 and gpt-oss) is left out.
"""

from __future__ import annotations

import dataclasses
import pathlib

CONFIGS = pathlib.Path(__file__).parent / "configs"


@dataclasses.dataclass(frozen=True)
class Model:
    """A published model.

    Attributes:
      key: name of its file in configs/, without the suffix.
      name: what it is called.
      repository: owner and name on huggingface.co, where its config.json is.
      parameters: number of parameters, in billions, as its publisher states it.
      stated: where the publisher states it.
      is_planned: whether the table has rows for it.
    """

    key: str
    name: str
    repository: str
    parameters: float
    stated: str
    is_planned: bool = True

    @property
    def config(self) -> pathlib.Path:
        """The file of its config."""
        return CONFIGS / f"{self.key}.json"


_LLAMA = "arXiv 2407.21783, table 3, and the model card"
_QWEN = "arXiv 2505.09388, tables 1 and 2, and the model card"
_GPT_OSS = "arXiv 2508.10925, table 1"
_MIXTRAL = "mistral.ai/news/mixtral-of-experts and the model card"

MODELS = (
    Model("olmoe-1b-7b", "OLMoE 1B-7B", "allenai/OLMoE-1B-7B-0924", 6.92, "arXiv 2409.02060"),
    Model("mistral-7b", "Mistral 7B", "mistralai/Mistral-7B-v0.1", 7.24, "the model card"),
    Model("llama-3.1-8b", "Llama 3.1 8B", "meta-llama/Llama-3.1-8B", 8.03, _LLAMA),
    Model("qwen3-8b", "Qwen3 8B", "Qwen/Qwen3-8B", 8.2, _QWEN, is_planned=False),
    Model("gpt-oss-20b", "gpt-oss 20B", "openai/gpt-oss-20b", 20.9, _GPT_OSS),
    Model("gemma-2-27b", "Gemma 2 27B", "google/gemma-2-27b", 27.2, "the model card"),
    Model("qwen3-30b-a3b", "Qwen3 30B-A3B", "Qwen/Qwen3-30B-A3B", 30.5, _QWEN),
    Model("mixtral-8x7b", "Mixtral 8x7B", "mistralai/Mixtral-8x7B-v0.1", 46.7, _MIXTRAL),
    Model("llama-3.1-70b", "Llama 3.1 70B", "meta-llama/Llama-3.1-70B", 70.6, _LLAMA),
    Model("gpt-oss-120b", "gpt-oss 120B", "openai/gpt-oss-120b", 116.8, _GPT_OSS),
    Model(
        "mixtral-8x22b",
        "Mixtral 8x22B",
        "mistralai/Mixtral-8x22B-v0.1",
        141,
        "mistral.ai/news/mixtral-8x22b",
        is_planned=False,
    ),
    Model("qwen3-235b-a22b", "Qwen3 235B-A22B", "Qwen/Qwen3-235B-A22B", 235, _QWEN),
    Model(
        "deepseek-v4-flash",
        "DeepSeek-V4-Flash",
        "deepseek-ai/DeepSeek-V4-Flash",
        284,
        "the model card",
    ),
    Model("glm-4.5", "GLM-4.5", "zai-org/GLM-4.5", 355, "arXiv 2508.06471", is_planned=False),
    Model("llama-3.1-405b", "Llama 3.1 405B", "meta-llama/Llama-3.1-405B", 405.9, _LLAMA),
    Model("deepseek-v3", "DeepSeek-V3", "deepseek-ai/DeepSeek-V3", 671, "arXiv 2412.19437"),
)
