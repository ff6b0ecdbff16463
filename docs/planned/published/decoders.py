"""Sizes of the decoders of published measurements, their Params, and their FLOPs."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Sequence
from typing import Any

import lingvo_gshard
from docs.planned import models
from lingvo_gshard.api.experiments import apply_settings
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.training.experiments import batch_specs, make_trainer
from lingvo_gshard.wings.facts.step import step_flops
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of

LLAMA, GPT = "llama", "gpt"
_GPT = "language_model.gpt3_175b"
_BUFFERS = "task.decoder.moe.dispatch = @lingvo_gshard.layers.moe.dispatches.gather.GatherDispatch"
_CONFIGS = pathlib.Path(__file__).parent / "configs"
# The base of MaxText's scaled models, base.yml: layers, M, heads of 128, H.
_MAXTEXT = (16, 2048, 16, 7168)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A decoder-only language model.

    Attributes:
      layers: number of layers.
      model_dim: size of M.
      heads: number of heads of queries.
      key_value_heads: number of heads of keys and values.
      head_dim: size of a head.
      hidden_dim: size of H.
      vocabulary: number of tokens.
      family: LLAMA (gated feed-forward layers, rotary positions, RMSNorm) or GPT (GELU, learned
        positions, LayerNorm).
      experts: experts of each layer; 0 for a dense model.
      experts_per_token: experts that compute a token.
      is_tied: whether the softmax shares the embedding of a GPT.
    """

    layers: int
    model_dim: int
    heads: int
    key_value_heads: int
    head_dim: int
    hidden_dim: int
    vocabulary: int
    family: str = LLAMA
    experts: int = 0
    experts_per_token: int = 1
    is_tied: bool = False

    def experiment(self, length: int, settings: Sequence[str]) -> Params:
        """Returns the experiment, with float32 weights and bfloat16 activations.

        Args:
          length: positions of a row.
          settings: gin statements, applied last.
        """
        if self.family == GPT:
            return lingvo_gshard.experiment(_GPT, [*self._gpt_settings(length), *settings])
        config = PublishedConfig(self._config(length), "docs/planned/published")
        params = experiment_of(config, length, "bfloat16")
        # Buffers without room to spare compute as many tokens as experts without buffers.
        buffers = [_BUFFERS, "task.decoder.moe.router.capacity_factor = 1.0"]
        return apply_settings(params, [*(buffers if self.experts else ()), *settings], ())

    def flops_per_token(self, length: int, recomputes: bool = False) -> int:
        """Returns the FLOPs of a training step per token, as MaxText and Megatron-LM count them.

        Three times the products of the forward pass. Attention counts all positions, those after a
        token included.

        Args:
          length: positions of a row.
          recomputes: whether the second forward pass of full rematerialization counts, too: four
            times the products of layers.
        """
        projections = self.model_dim * self.head_dim * 2 * (self.heads + self.key_value_heads)
        products = 3 if self.family == LLAMA else 2
        feed_forward = products * self.model_dim * self.hidden_dim * self.experts_per_token
        router = self.model_dim * self.experts
        scores = 2 * length * self.heads * self.head_dim
        layers = 2 * self.layers * (projections + feed_forward + router + scores)
        return (4 if recomputes else 3) * layers + 3 * 2 * self.model_dim * self.vocabulary

    def _config(self, length: int) -> dict[str, Any]:
        """Returns what a config.json of transformers would hold."""
        config = {
            "model_type": "mixtral" if self.experts else "llama",
            "hidden_size": self.model_dim,
            "intermediate_size": self.hidden_dim,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "hidden_act": "silu",
            "max_position_embeddings": length,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        }
        if self.experts:
            config |= {
                "num_local_experts": self.experts,
                "num_experts_per_tok": self.experts_per_token,
            }
        return config

    def _gpt_settings(self, length: int) -> list[str]:
        return [
            f"task.model_dim = {self.model_dim}",
            f"task.tie_softmax = {self.is_tied}",
            f"task.positions.max_length = {length}",
            f"task.decoder.num_layers = {self.layers}",
            f"task.decoder.num_heads = {self.heads}",
            f"task.decoder.hidden_dim = {self.hidden_dim}",
            f"task.decoder.layer.self_attention.head_dim = {self.head_dim}",
            f"input.length = {length}",
            f"input.vocabulary.size = {self.vocabulary}",
            "step.micro_batches = 1",
        ]


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A language model with experts that is described by its published config.json.

    Attributes:
      key: name of the file, without the suffix.
      parameters: number of parameters in billions, as the publisher states it.
      capacity: the capacity factor of buffers that drop tokens; 0 for experts that drop none.
        One-hot products fill the buffers of each row, as in MaxText.
    """

    key: str
    parameters: float
    capacity: float = 0.0

    def experiment(self, length: int, settings: Sequence[str]) -> Params:
        """Returns the experiment, as `Decoder.experiment` does."""
        own = _CONFIGS / f"{self.key}.json"
        path = own if own.exists() else models.CONFIGS / own.name
        dropping = (
            "task.decoder.moe.dispatch = @lingvo_gshard.layers.moe.EinsumDispatch",
            f"task.decoder.moe.group_size = {length}",
            f"task.decoder.moe.router.capacity_factor = {self.capacity}",
        )
        settings = [*(dropping if self.capacity else ()), *settings]
        return lingvo_gshard.open_model(
            path, length=length, precision="bfloat16", settings=settings
        )

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def flops_per_token(self, length: int, recomputes: bool = False) -> int:
        """Returns the FLOPs of a training step per token, as their publishers count them.

        Attention counts the visible positions alone.

        Args:
          length: positions of a row.
          recomputes: not supported.
        """
        assert not recomputes
        params = self.experiment(length, ["input.batch_rows = 1"])
        return step_flops(make_trainer(params).task, batch_specs(params)) // length


def maxtext(scale: int) -> Decoder:
    """Returns MaxText's model of about `scale` billion weights (`global_parameter_scale`).

    Its doublings go round: heads and H, then M, then layers (`get_individual_scales` in
    src/maxtext/configs/types.py).
    """
    times, rest = divmod(scale.bit_length() - 1, 3)
    layers, model_dim, heads, hidden_dim = _MAXTEXT
    wide, deep = 2 ** (times + (rest > 0)), 2**times
    return Decoder(
        layers=layers * deep,
        model_dim=model_dim * 2 ** (times + (rest > 1)),
        heads=heads * wide,
        key_value_heads=heads * wide,
        head_dim=128,
        hidden_dim=hidden_dim * wide,
        vocabulary=32_000,
    )


def megatron(layers: int, model_dim: int, heads: int, vocabulary: int, is_tied: bool) -> Decoder:
    """Returns a GPT of Megatron-LM's tables."""
    return Decoder(
        layers=layers,
        model_dim=model_dim,
        heads=heads,
        key_value_heads=heads,
        head_dim=model_dim // heads,
        hidden_dim=4 * model_dim,
        vocabulary=vocabulary,
        family=GPT,
        is_tied=is_tied,
    )


MISTRAL_7B = Decoder(32, 4096, 32, 8, 128, 14_336, 32_000)
LLAMA_2_70B = Decoder(80, 8192, 64, 8, 128, 28_672, 32_000)
LLAMA_3_8B = Decoder(32, 4096, 32, 8, 128, 14_336, 128_256)
LLAMA_3_70B = Decoder(80, 8192, 64, 8, 128, 28_672, 128_256)
LLAMA_3_405B = Decoder(126, 16_384, 128, 8, 128, 53_248, 128_256)
MIXTRAL_8X7B = Decoder(32, 4096, 32, 8, 128, 14_336, 32_000, experts=8, experts_per_token=2)
MIXTRAL_8X7B_DROPPED = Mixture("mixtral-8x7b", 46.7, capacity=1.25)
MIXTRAL_8X22B_DROPPED = Mixture("mixtral-8x22b", 141, capacity=1.25)
QWEN_3_30B = Mixture("qwen3-30b-a3b", 30.5)
QWEN_3_235B = Mixture("qwen3-235b-a22b", 235)
GPT_OSS_120B = Mixture("gpt-oss-120b", 116.8)
LLAMA_4_SCOUT = Mixture("llama-4-scout", 109)
LLAMA_4_MAVERICK = Mixture("llama-4-maverick", 400)
DEEPSEEK_V3 = Mixture("deepseek-v3", 671)
# torchtitan's small variant, which has the sizes of DeepSeek-V2-Lite.
DEEPSEEK_16B = Mixture("deepseek-16b", 15.7)
