"""The models and hyperparameters that other libraries train with.

`published` is what a library's authors train small models with; `short` is a dense model with the
FLOPs of the quickstart's, and rates for minutes. The published rates rise for thousands of steps,
more than ten minutes of a CPU have, so all rise for WARMUP_STEPS here.

- marian: the model `student.tiny` with a decoder that attends, since transformers has no SSRU
  (https://github.com/mozilla/translations/tree/main/pipeline/train/configs), with the rate and
  label smoothing of Marian's transformer-base
  (https://github.com/marian-nmt/marian-dev/blob/master/src/common/aliases.cpp), and initial weights
  as wide as Marian's.
- joeynmt: https://github.com/joeynmt/joeynmt/blob/main/configs/iwslt14_deen_bpe.yaml, with the
  schedule of iwslt14_deen_sp.yaml beside it: the usual one, `plateau`, fails with PyTorch 2.13.

All read the pieces of one SentencePiece model of the quickstart's size, which is also in the range
of https://github.com/mozilla/translations/blob/main/docs/vocab-size.md. Sources have no tag of
their language, neither in the quickstart nor in OPUS-MT's models to English.
"""

from __future__ import annotations

import dataclasses

from benchmarks.decode.sizes import DenseSizes

VOCABULARY_SIZE, WARMUP_STEPS = 4000, 200
# The modules that each library needs.
MODULES = {
    "marian": ("torch", "transformers", "accelerate", "sentencepiece"),
    "joeynmt": ("torch", "joeynmt", "importlib_metadata"),
}
NAMES = ("published", "short")


@dataclasses.dataclass(frozen=True)
class Setting:
    """The hyperparameters of a library.

    Attributes:
      library: one of MODULES.
      name: one of NAMES.
      sizes: the model's sizes.
      schedule: "linear", to zero at the end of the time, or "inverse_sqrt".
      batch_size: sentence pairs of a batch for marian, tokens with padding for joeynmt.
    """

    library: str
    name: str
    sizes: DenseSizes
    dropout: float
    learning_rate: float
    schedule: str
    batch_size: int


def _sizes(width: int, heads: int, encoder: int, decoder: int, hidden: int) -> DenseSizes:
    """Returns sizes with so many layers of the encoder and of the decoder."""
    return DenseSizes(width, heads, encoder, hidden, decoder, hidden, VOCABULARY_SIZE, 3, 512)


_TINY, _IWSLT = _sizes(256, 8, 6, 2, 1536), _sizes(256, 4, 6, 6, 1024)
_SHORT = _sizes(128, 4, 2, 2, 768)
SETTINGS = (
    Setting("marian", "published", _TINY, 0.1, 3e-4, "inverse_sqrt", batch_size=128),
    Setting("marian", "short", _SHORT, 0.1, 2e-3, "linear", batch_size=128),
    Setting("joeynmt", "published", _IWSLT, 0.3, 3e-4, "inverse_sqrt", batch_size=4096),
    Setting("joeynmt", "short", _SHORT, 0.1, 2e-3, "inverse_sqrt", batch_size=4096),
)
