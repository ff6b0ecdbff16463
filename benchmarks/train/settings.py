"""The models and hyperparameters that other libraries train with.

`published` is what a library's authors train small models with; `short` is a model with the FLOPs
of the quickstart's, and rates that suit minutes. The published rates rise for thousands of steps,
which minutes of a CPU do not reach, so that here they rise for as many as in `short`.

- Marian: the student `tiny` and the label smoothing and rate of transformer-base,
  https://github.com/mozilla/translations/tree/main/pipeline/train/configs and
  https://github.com/marian-nmt/marian-dev/blob/master/src/common/aliases.cpp. transformers has no
  recurrent decoder (SSRU); its decoder attends. Beam size 4 is that of the OPUS models.
- JoeyNMT: https://github.com/joeynmt/joeynmt/blob/main/configs/iwslt14_deen_bpe.yaml. Its schedule
  `plateau` is constant without validation.

Every library reads pieces of one SentencePiece vocabulary, which is trained on the same rows. Its
size is the quickstart's, and in the range that Mozilla advises for half a million pairs
(https://github.com/mozilla/translations/blob/main/docs/vocab-size.md). No tag names the language of
a source, as in the OPUS models of many languages to English, and as in the quickstart.
"""

from __future__ import annotations

import dataclasses

from benchmarks.decode.sizes import DenseSizes

VOCABULARY_SIZE = 4000
# The modules that each library needs.
MODULES = {
    "marian": ("torch", "transformers", "accelerate", "sentencepiece"),
    "joeynmt": ("torch", "joeynmt", "importlib_metadata"),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a library trains.

    Attributes:
      library: its name, one of MODULES.
      name: name of the setting.
      sizes: the model's sizes.
      batch_size: sentence pairs of a batch for marian, tokens with padding for joeynmt.
      schedule: "linear" to zero at the end of the time, or a schedule of the library.
      beam_size: hypotheses of the search.
    """

    library: str
    name: str
    sizes: DenseSizes
    dropout: float
    learning_rate: float
    warmup_steps: int
    schedule: str
    batch_size: int
    beam_size: int


def _sizes(model_dim: int, num_heads: int, layers: tuple[int, int], hidden_dim: int) -> DenseSizes:
    """Returns sizes with so many layers of the encoder and of the decoder."""
    return DenseSizes(
        model_dim=model_dim,
        num_heads=num_heads,
        encoder_layers=layers[0],
        encoder_hidden=hidden_dim,
        decoder_layers=layers[1],
        decoder_hidden=hidden_dim,
        vocabulary_size=VOCABULARY_SIZE,
        eos_id=3,
        positions=512,
    )


_SHORT = _sizes(128, 4, (2, 2), 768)
SETTINGS = (
    Setting(
        library="marian",
        name="published",
        sizes=_sizes(256, 8, (6, 2), 1536),
        dropout=0.1,
        learning_rate=3e-4,
        warmup_steps=200,
        schedule="inverse_sqrt",
        batch_size=128,
        beam_size=4,
    ),
    Setting(
        library="marian",
        name="short",
        sizes=_SHORT,
        dropout=0.1,
        learning_rate=2e-3,
        warmup_steps=200,
        schedule="linear",
        batch_size=128,
        beam_size=4,
    ),
    Setting(
        library="joeynmt",
        name="published",
        sizes=_sizes(256, 4, (6, 6), 1024),
        dropout=0.3,
        learning_rate=3e-4,
        warmup_steps=0,
        schedule="plateau",
        batch_size=4096,
        beam_size=5,
    ),
    Setting(
        library="joeynmt",
        name="short",
        sizes=_SHORT,
        dropout=0.1,
        learning_rate=2e-3,
        warmup_steps=200,
        schedule="warmupinversesquareroot",
        batch_size=4096,
        beam_size=5,
    ),
)
NAMES = tuple(dict.fromkeys(setting.name for setting in SETTINGS))


def chosen(libraries: list[str], names: list[str]) -> list[Setting]:
    """Returns the settings of some libraries that have some names."""
    return [each for each in SETTINGS if each.library in libraries and each.name in names]
