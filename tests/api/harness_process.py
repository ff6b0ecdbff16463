"""Has lm-evaluation-harness score a model, and writes the scores.

    python harness_process.py run LOGDIR FOLDER SCORES.json [PACKAGES]
    python harness_process.py server URL FOLDER SCORES.json TOKENIZER
    python harness_process.py transformers DIRECTORY FOLDER SCORES.json

FOLDER has the tasks. PACKAGES is a directory with the harness, for a Python without it.
"""

import json
import pathlib
import sys

TASKS = ("tiny_choice", "tiny_answer")
# The client of servers leaves the start of texts to the server, so that its sums begin later.
ROLLING = "tiny_text"


def of_run(logdir, folder, packages=""):
    """Returns the scores of a run, as gshard-evaluate computes them."""
    if packages:
        # At the end: the packages of this Python come first.
        sys.path.append(packages)
    import lingvo_gshard as gshard
    from lingvo_gshard.api.options import TaskOptions
    from lingvo_gshard.api.tasks import evaluate_on_tasks

    options = TaskOptions(tasks=(*TASKS, ROLLING), tasks_folder=folder)
    return evaluate_on_tasks(gshard.load(logdir), options).results


def of_peer(model, arguments, folder, tasks):
    """Returns the scores of a model that the harness itself knows how to ask."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    found = lm_eval.simple_evaluate(
        model,
        model_args=arguments,
        tasks=list(tasks),
        task_manager=TaskManager(include_path=folder),
        log_samples=False,
    )
    return found["results"]


def main():
    """Scores, and writes the scores."""
    kind, what, folder, scores, *more = sys.argv[1:]
    if kind == "run":
        found = of_run(what, folder, *more)
    elif kind == "server":
        arguments = {"model": "open_models.llama", "base_url": what, "tokenizer": more[0]}
        arguments |= {"tokenizer_backend": "huggingface", "max_length": 32, "num_concurrent": 1}
        found = of_peer("local-completions", arguments, folder, TASKS)
    else:
        arguments = {"pretrained": what, "device": "cpu", "dtype": "float32"}
        found = of_peer("hf", arguments, folder, TASKS)
        # By default the harness also predicts the token before all texts, after itself.
        found |= of_peer("hf", arguments | {"add_bos_token": False}, folder, (ROLLING,))
    numbers = {
        task: {k: v for k, v in values.items() if isinstance(v, float) and "," in k}
        for task, values in found.items()
    }
    pathlib.Path(scores).write_text(json.dumps(numbers), encoding="utf-8")


if __name__ == "__main__":
    main()
