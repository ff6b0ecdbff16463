"""The formats of exports: each writes one kind of directory."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

from lingvo_gshard.core import Params, Progress, UserError, names
from lingvo_gshard.wings.export import (
    decoder,
    safetensors_writer,
    saved_model_writer,
    stablehlo_writer,
)

WriteDecoder = Callable[[decoder.PortableDecoder, pathlib.Path, Progress], None]


@dataclasses.dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
      about: what it is, for users.
      write_decoder: writes a decoder; None for a format of weights only.
      is_streamed: whether weights are written one by one from the checkpoint, by
        `open_models.exporting`.
      check_installed: raises ValueError if a package is missing.
    """

    about: str
    write_decoder: WriteDecoder | None = None
    is_streamed: bool = False
    check_installed: Callable[[], None] = lambda: None

    def check(self, name: str, params: Params, settings: decoder.DecoderSettings | None) -> None:
        """Raises UserError if an experiment cannot be written so, before weights are read."""
        if self.write_decoder:
            decoder.check_task(params)
            self.check_installed()
        elif settings is not None:
            raise UserError(
                f"`format={name}` writes weights, which do not depend on a decoder: "
                f"{settings.first_given} does not apply"
            )

    def write(
        self,
        model: decoder.TrainedModel,
        directory: pathlib.Path,
        settings: decoder.DecoderSettings | None,
        progress: Progress,
    ) -> None:
        """Writes a model into an empty directory."""
        if self.write_decoder:
            made = decoder.make_decoder(model, settings or decoder.DecoderSettings())
            self.write_decoder(made, directory, progress)
        else:
            safetensors_writer.write(model, directory)


# The formats of the adapters of a published model, and of a model whose weights are in 4 bits.
PEFT, IN_4_BITS = "peft", "huggingface_4bit"

FORMATS = {
    "safetensors": Format("the weights by path, for PyTorch, jax, NumPy, Rust, ..."),
    "stablehlo": Format("decoding programs, for jax alone", stablehlo_writer.write),
    "saved_model": Format(
        "a SavedModel from strings to strings, for TensorFlow Serving",
        saved_model_writer.write,
        check_installed=saved_model_writer.check_installed,
    ),
    "huggingface": Format("a published model, for transformers, vLLM, ...", is_streamed=True),
    IN_4_BITS: Format("the same, in the 4 bits that it was published in", is_streamed=True),
    PEFT: Format("the adapters of a published model, for peft, vLLM, ...", is_streamed=True),
}


def format_of(name: str) -> Format:
    """Returns a format. Raises ValueError with the nearest valid name if it is unknown."""
    names.check(name, FORMATS, f"`format={name}` is unknown")
    return FORMATS[name]
