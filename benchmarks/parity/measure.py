"""Compares imported models with transformers: logits, gradients, tokens, and exported weights."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.parity.case import LENGTH, NEW_TOKENS, PROMPTS, Case
from benchmarks.parity.peer import Peer
from benchmarks.parity.peer_process import GRADIENTS, OUTPUTS
from lingvo_gshard.api.importing import import_model
from lingvo_gshard.api.run import Run
from lingvo_gshard.core import context
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.core.lazy import tf
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.core.progress import Progress
from lingvo_gshard.data.input import TextIds
from lingvo_gshard.tasks.language_model import LanguageModelTask
from lingvo_gshard.tasks.token_task import TokenTask
from lingvo_gshard.tasks.translation import TranslationTask
from lingvo_gshard.wings.inference.loading import facts_of, make_engine
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.requests import Request
from lingvo_gshard.wings.open_models.families import FAMILIES
from lingvo_gshard.wings.open_models.importing import PublishedModel, by_published_names
from lingvo_gshard.wings.open_models.shards import read_headers

# Share of a model's largest gradient below which a tensor's gradients count as zero.
_NEGLIGIBLE = 1e-3
# Results of transformers, by name.
Outputs = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class ModelDifference:
    """The difference between a model here and in transformers.

    Attributes:
      family: the `model_type`.
      option: what is particular to the model.
      logits: largest difference of the logits in float32.
      logits_bfloat16: largest difference of logits computed with bfloat16 activations and weights
        from transformers' float32 logits: (here, in transformers).
      gradients: largest difference of a gradient, as a share of the tensor's largest gradient.
      tokens: number of tokens decoded greedily.
      equal_tokens: number of tokens that equal the tokens of transformers.
      exported: largest difference of the logits of the exported model in transformers.
      is_bit_equal: whether all exported tensors equal the imported ones in every bit.
    """

    family: str
    option: str
    logits: float
    logits_bfloat16: tuple[float, float]
    gradients: float
    tokens: int
    equal_tokens: int
    exported: float
    is_bit_equal: bool


def measure(
    cases: Sequence[Case], peer: Peer, folder: pathlib.Path, progress: Progress
) -> Iterator[ModelDifference]:
    """Yields the row of each case.

    Args:
      cases: the models.
      peer: runs transformers.
      folder: a directory for runs and exports.
      progress: is told each stage as it begins.
    """
    for number, case in enumerate(cases):
        progress.begin(case.name)
        peer.make(number)
        yield _compare(case, number, peer, folder)


def _compare(case: Case, number: int, peer: Peer, folder: pathlib.Path) -> ModelDifference:
    source, logdir, output = peer.directory(number), folder / f"{number}", folder / f"out-{number}"
    expected = dict(np.load(source / OUTPUTS))
    import_model(source, logdir, length=LENGTH + NEW_TOKENS)
    run = Run(logdir)
    model = run.model
    theta = model.theta.transform(tf.convert_to_tensor)
    task = model.task
    assert isinstance(task, TokenTask)
    batch = _batch(expected)
    logits = _logits(task, theta, batch)
    run.export(output, "huggingface")
    return ModelDifference(
        family=case.model_type,
        option=case.option,
        logits=_largest(logits, expected["logits"]),
        logits_bfloat16=(
            _largest(_bfloat16_logits(run, theta, batch), expected["logits"]),
            _largest(expected["bfloat16"], expected["logits"]),
        ),
        gradients=_gradient_difference(run, theta, batch, source / GRADIENTS),
        tokens=expected["tokens"].size,
        equal_tokens=_equal_tokens(case, run, theta, expected),
        exported=peer.load(number, output),
        is_bit_equal=_are_equal(case, source, output),
    )


def _largest(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max())


def _batch(expected: Outputs) -> dict[str, tf.Tensor]:
    """Returns a batch with one text in each row. The labels are all ids after the first."""
    inputs = expected["ids"].astype(np.int32)
    positions = np.tile(np.arange(inputs.shape[1]), (len(inputs), 1))
    batch = {
        "target_inputs": inputs,
        "target_labels": np.concatenate([inputs[:, 1:], np.zeros_like(inputs[:, :1])], 1),
        "target_segments": np.ones_like(inputs),
        "target_positions": positions,
    }
    if "sources" in expected:
        batch |= {
            "source_ids": expected["sources"],
            "source_segments": expected["mask"],
            "source_positions": positions,
        }
    return {name: tf.constant(array, tf.int32) for name, array in batch.items()}


def _logits(task: TokenTask, theta: NestedMap, batch: dict[str, tf.Tensor]) -> np.ndarray:
    assert isinstance(task, (LanguageModelTask, TranslationTask))
    with context.scope(training=False):
        return tf.cast(task.logits(theta, batch), tf.float32).numpy()


def _bfloat16_logits(run: Run, theta: NestedMap, batch: dict[str, tf.Tensor]) -> np.ndarray:
    params = run.params.task.copy().set(dtype="bfloat16", fprop_dtype="bfloat16")
    specs = (task := params.instantiate()).variable_specs()
    pairs = zip(theta.flatten(), specs.flatten(), strict=True)
    return _logits(task, specs.pack(tf.cast(w, spec.dtype) for w, spec in pairs), batch)


def _gradient_difference(
    run: Run, theta: NestedMap, batch: dict[str, tf.Tensor], directory: pathlib.Path
) -> float:
    """Returns the largest difference from gradients that were written as a model's weights.

    A difference is relative to the largest gradient of its tensor. Some gradients are zero but for
    rounding, such as the gradient of a bias of keys. Such a tensor's differences are relative to
    _NEGLIGIBLE times the largest gradient of all tensors.
    """
    task = _for_gradients(run.params.task).instantiate()
    batch = {
        name: array[:, :-1] if name.startswith("target") else array for name, array in batch.items()
    }
    flat = theta.flatten()
    with context.scope(training=False), tf.GradientTape() as tape:
        tape.watch(flat)
        loss, _ = task.loss(theta, batch)
    found = tape.gradient(loss, flat, unconnected_gradients=tf.UnconnectedGradients.ZERO)
    gradients = dict(theta.pack(found).flatten_items())
    published = PublishedModel.open(directory, run.params)
    differences = []
    for path in published.mapping.specs:
        ours = tf.convert_to_tensor(gradients[path]).numpy()
        for part in published.parts(path):
            theirs = part.read()
            if not np.isnan(theirs).any():
                largest = float(np.abs(theirs).max())
                differences.append((_largest(ours[part.index], theirs), largest))
    least = _NEGLIGIBLE * max(largest for _, largest in differences)
    return max(difference / max(largest, least) for difference, largest in differences)


def _for_gradients(task: Params) -> Params:
    """Returns a task whose loss is the cross-entropy alone, as in transformers."""
    task = task.copy()
    for _, node in task.nodes():
        for name in ("auxiliary_loss_weight", "z_loss_weight"):
            if name in node:
                node.set(**{name: 0.0})
    return task


def _equal_tokens(case: Case, run: Run, theta: NestedMap, outputs: Outputs) -> int:
    """Returns how many of the tokens that follow the beginning of each row are as expected.

    A language model goes on with beginnings of different lengths, all in one batch.
    """
    task: Any = run.model.task
    expected = outputs["tokens"]
    # As there, no token ends a text: the end is an id that is not expected.
    size = task.id_ranges()["target_labels"]
    end = next(i for i in range(size) if i not in expected)
    facts = facts_of(task, run.params.input, text_ids=TextIds((end,), (end,)))
    options = DecodingOptions(beam_size=1, most_tokens=NEW_TOKENS)
    if case.start:
        pairs = zip(outputs["sources"], outputs["mask"], strict=True)
        sources = [tuple(map(int, row[mask > 0])) for row, mask in pairs]
        requests = [Request(source, case.start, options) for source in sources]
    else:
        pairs = zip(outputs["ids"], PROMPTS, strict=True)
        beginnings = [tuple(map(int, row[:size])) for row, size in pairs]
        requests = [Request(given=beginning, options=options) for beginning in beginnings]
    with make_engine(task, theta.transform(lambda w: w.numpy()), facts) as engine:
        found = [answer.result()[0].tokens for answer in engine.submit_all(requests)]
    pairs = zip(found, expected, strict=True)
    return sum(int(a == b) for one, other in pairs for a, b in zip(one, other, strict=False))


def _are_equal(case: Case, source: pathlib.Path, output: pathlib.Path) -> bool:
    before, after = read_headers(source), read_headers(output)
    before = by_published_names(before, after, FAMILIES[case.model_type].keys.renamed)
    return before.keys() == after.keys() and all(
        before[name].dtype == after[name].dtype
        and before[name].read().tobytes() == after[name].read().tobytes()
        for name in before
    )
