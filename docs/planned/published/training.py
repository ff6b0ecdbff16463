"""What is known of one published measurement of a training."""

from __future__ import annotations

import dataclasses

from docs.planned.published.decoders import Decoder, Mixture


@dataclasses.dataclass(frozen=True)
class Training:
    """A published measurement.

    Attributes:
      key: name of the row.
      name: the model, as the source calls it.
      publisher: whose program was measured.
      source: where the figure and its configuration are.
      decoder: sizes of the model.
      topology: the machine.
      mesh: axes and sizes.
      strategy: name of the strategy.
      rows: rows of a batch, of all devices.
      length: positions of a row.
      rematerialize: policy.
      precision: value of `step.precision`.
      teraflops: published TFLOP/s of a chip; 0 if `tokens` is published.
      tokens: published tokens per second of a chip; 0 if `teraflops` is published.
      recomputes: whether the published FLOPs count the second forward pass.
      planned: how the plan differs from what was measured, and what was assumed.
      compile_options: options of the compiler besides those that are on.
      segments: the most texts of a row; 0 for as many as fit.
      passes: micro-batches of a step.
      settings: gin statements, applied last.
      term: with experts, the term of the step that separates the estimate from the measurement.
    """

    key: str
    name: str
    publisher: str
    source: str
    decoder: Decoder | Mixture
    topology: str
    mesh: str
    strategy: str
    rows: int
    length: int
    rematerialize: str
    precision: str = "bfloat16"
    teraflops: float = 0.0
    tokens: float = 0.0
    recomputes: bool = False
    planned: str = ""
    compile_options: tuple[str, ...] = ()
    segments: int = 0
    passes: int = 1
    settings: tuple[str, ...] = ()
    term: str = ""

    @property
    def published(self) -> float:
        """The published tokens per second of a chip."""
        counted = self.decoder.flops_per_token(self.length, self.recomputes)
        return self.tokens or 1e12 * self.teraflops / counted

    @property
    def has_experts(self) -> bool:
        """Whether the model has experts."""
        return isinstance(self.decoder, Mixture) or bool(self.decoder.experts)
