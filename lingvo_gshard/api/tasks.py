"""Scores a run on published tasks, by EleutherAI's lm-evaluation-harness (extra `tasks`).

https://github.com/EleutherAI/lm-evaluation-harness
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_gshard.api.options import TaskOptions
from lingvo_gshard.api.run import Run
from lingvo_gshard.core import UserError, names
from lingvo_gshard.data import Vocabulary
from lingvo_gshard.tasks import Evaluation, Table
from lingvo_gshard.wings.fine_tuning.conversations.chat_template import ChatTemplate
from lingvo_gshard.wings.fine_tuning.conversations.conversation_input import chat_template_of
from lingvo_gshard.wings.inference.engine.engine import Engine
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.requests import Request
from lingvo_gshard.wings.inference.scoring import score
from lingvo_gshard.wings.inference.text import continuation, stop_check

# New tokens of an answer, where a task does not say how many; as in the harness.
_USUAL_TOKENS = 256


@dataclasses.dataclass(frozen=True)
class TaskScores(Evaluation):
    """The scores of a model on tasks.

    Attributes:
      results: task -> metric with its filter, as the harness names them -> value.
      questions: task -> number of questions.
      versions: task -> its version.
    """

    results: Mapping[str, Mapping[str, float]]
    questions: Mapping[str, int]
    versions: Mapping[str, Any]

    @property
    def size(self) -> str:
        return f"{sum(self.questions.values()):,} questions"

    def to_record(self) -> dict[str, Any]:
        """Returns all scores by task, the numbers of questions and the versions."""
        return dataclasses.asdict(self)

    def table(self) -> Table:
        """Returns a row for each metric of each task."""
        rows = []
        for task, values in self.results.items():
            for metric, value in values.items():
                name, _, applied = metric.partition(",")
                if name.endswith("_stderr"):
                    continue
                error = values.get(f"{name}_stderr,{applied}")
                shown = "" if error is None or math.isnan(error) else f"{error:.4f}"
                count = self.questions.get(task)
                rows.append((task, name, f"{value:.4f}", shown, f"{count:,}" if count else ""))
        columns = ("task", "metric", "", "standard error", "questions")
        return Table(columns, rows, text_columns=(0, 1))


def evaluate_on_tasks(run: Run, options: TaskOptions) -> TaskScores:
    """Returns the scores of a run's model on tasks.

    Args:
      run: a run of a language model.
      options: the tasks, and how they are asked.

    Raises:
      UserError: the harness is not installed, a task is unknown, or the model cannot answer it.
    """
    if not importlib.util.find_spec("lm_eval"):
        raise UserError("tasks need lm-evaluation-harness: pip install lm-eval installs it")
    if options.tasks_folder and not pathlib.Path(options.tasks_folder).is_dir():
        raise UserError(f"`tasks_folder={options.tasks_folder}`: there is no such directory")
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=options.tasks_folder or None)
    for task in options.tasks:
        if not manager.match_tasks([task]):
            hint = names.nearest(task, manager.all_tasks)
            raise UserError(f"`tasks={task}` is unknown. {hint}")
    model = _harness_model()(run)
    if options.chat_template and model.template is None:
        raise UserError("`chat_template`: the model has no chat template")
    found = lm_eval.simple_evaluate(
        model,
        tasks=list(options.tasks),
        num_fewshot=options.few_shot,
        limit=options.limit,
        task_manager=manager,
        apply_chat_template=options.chat_template,
        log_samples=False,
    )
    assert found is not None
    return TaskScores(
        results={task: _numbers(values) for task, values in found["results"].items()},
        questions={task: n["effective"] for task, n in found.get("n-samples", {}).items()},
        versions=dict(found.get("versions", {})),
    )


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the metrics among the values of a task."""
    return {
        name: float(value)
        for name, value in values.items()
        if "," in name and isinstance(value, (int, float))
    }


class Answering:
    """Answers the harness with a run's model, by the methods of the harness's TemplateLM."""

    def __init__(self, run: Run):
        super().__init__()
        decoder: Any = run.decoder
        self._engine: Engine = decoder.engine
        self._vocabulary: Vocabulary = decoder.input.vocabulary
        self._progress = run.progress
        self.template: ChatTemplate | None = chat_template_of(decoder.input)
        self.max_length = self._engine.facts.most_positions

    @property
    def eot_token_id(self) -> int:
        """The id that ends a text."""
        return self._vocabulary.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The id before a text without context."""
        return self._vocabulary.bos_id

    @property
    def tokenizer_name(self) -> str:
        """The name of the tokenizer in caches of the harness."""
        return type(self._vocabulary).__name__

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Returns the ids of a text, with those before all texts unless they are not wanted."""
        ids = self._vocabulary.encode(string)
        wants = add_special_tokens is not False and bool(self._vocabulary.before)
        return [*self._vocabulary.begin(ids)] if wants else ids

    def _loglikelihood_tokens(self, requests: Any, **kwargs: Any) -> list[tuple[float, bool]]:
        """Returns the log-probability of each answer, and whether it is the likeliest one."""
        self._progress.begin("Scoring", "texts", len(requests))
        found = []
        for number, (_, context, answer) in enumerate(requests):
            self._progress.update(number, number / len(requests))
            # The harness knows one id before texts, and gives none for a context of spaces.
            is_empty = [*context] == [self.prefix_token_id]
            found.append(self._score(() if is_empty else context, answer))
        return found

    @property
    def _start(self) -> tuple[int, ...]:
        """The ids before a text without context."""
        return self._vocabulary.begin(())

    def _score(self, context: Sequence[int], answer: Sequence[int]) -> tuple[float, bool]:
        """Returns the log-probability of tokens after others, and whether they are the likeliest.

        An answer that is longer than the model's rows is scored in parts. Before each part, the
        model sees as many tokens as it has room for, at least one.
        """
        whole, total, is_greedy = [*(context or self._start), *answer], 0.0, True
        at, end = len(whole) - len(answer), self.max_length + (len(context) or 1)
        while at < len(whole):
            end = min(end, len(whole))
            ids, count = whole[max(end - self.max_length - 1, 0) : end], end - at
            scores = score(self._engine, ids)
            total += float(scores.log_probabilities[-count:].sum(dtype=np.float64))
            is_greedy &= bool(np.array_equal(scores.likeliest[-count:], ids[-count:]))
            at, end = end, end + self.max_length
        return total, is_greedy

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each text, in windows as long as the model allows.

        The ids before all texts are given and not predicted. The harness's own models predict them
        once more, after themselves.
        """
        count, parts = len(self._start), []
        for request in requests:
            ids = self._vocabulary.encode(request.args[0])
            has_start = tuple(ids[:count]) == self._start
            parts.append((None, (), ids[count:] if has_start else ids))
        return [value for value, _ in self._loglikelihood_tokens(parts)]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Returns the texts that continue contexts."""
        # Equal requests get different texts, and the same ones in every evaluation.
        asked = [self._request(number, *each.args) for number, each in enumerate(requests)]
        self._progress.begin("Generating", "texts", len(asked))
        texts = []
        for number, (request, answer) in enumerate(
            zip(asked, self._engine.submit_all(asked), strict=True)
        ):
            self._progress.update(number, number / len(asked))
            tokens, stop = answer.result()[0].tokens, request.options.stop
            texts.append(continuation(self._vocabulary, request.given, tokens, stop))
        return texts

    def _request(self, seed: int, context: str, settings: Mapping[str, Any]) -> Request:
        until = settings.get("until") or ()
        stop = (until,) if isinstance(until, str) else tuple(until)
        most = int(settings.get("max_gen_toks", _USUAL_TOKENS))
        temperature = settings.get("temperature", 0.0) if settings.get("do_sample") else 0.0
        options = DecodingOptions(
            beam_size=1,
            temperature=float(temperature),
            seed=seed,
            most_tokens=min(most, self.max_length - 1),
            stop=tuple(text for text in stop if text),
        )
        room = self.max_length - options.most_tokens
        given = self.tok_encode(context)[-room:] or [self._vocabulary.bos_id]
        should_stop = stop_check(self._vocabulary, given, options)
        return Request(given=given, options=options, should_stop=should_stop)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the program of the chat template, if it is wanted."""
        return self.template.source if chat_template and self.template else None

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns a conversation as text; without a prompt, its last turn goes on."""
        assert self.template is not None
        if add_generation_prompt:
            return self.template.render(chat_history, add_generation_prompt=True).text
        *before, last = chat_history
        begun = self.template.render(before, add_generation_prompt=True).text
        return begun + last["content"]


@functools.cache
def _harness_model() -> Any:
    """Returns the class that the harness asks. It is made here, since its base is no dependency."""
    from lm_eval.api.model import TemplateLM

    return type("HarnessModel", (Answering, TemplateLM), {})
