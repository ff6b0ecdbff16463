"""Faults that happen to the files of a run between two starts."""

import pathlib

from tests.soak.faults import Fault
from tests.soak.run import Run

_PARAMS, _METRICS = "params.txt", "metrics.jsonl"


def _file_of_newest(run: Run) -> pathlib.Path:
    """Returns a random file of the newest checkpoint, which counts as damaged from now on."""
    step = run.checkpoints()[-1]
    files = (run.logdir / "checkpoints" / str(step)).rglob("*")
    path = run.random.choice(sorted(path for path in files if path.is_file()))
    run.damaged.add(step)
    return path


def _item(path: pathlib.Path) -> str:
    """Returns the item of a checkpoint that a file belongs to, such as theta."""
    parts = path.parts
    inside = parts[parts.index("checkpoints") + 2 :]
    return inside[0] if len(inside) > 1 else "the index"


def _truncate(run: Run) -> str:
    path = _file_of_newest(run)
    content = path.read_bytes()
    path.write_bytes(content[: run.random.randrange(max(len(content), 1))])
    return f"cut a file of {_item(path)}"


def _flip_a_byte(run: Run) -> str:
    path = _file_of_newest(run)
    content = bytearray(path.read_bytes())
    if content:
        content[run.random.randrange(len(content))] ^= 1 << run.random.randrange(8)
    path.write_bytes(content)
    return f"flipped a bit of {_item(path)}"


def _remove(run: Run) -> str:
    path = _file_of_newest(run)
    path.unlink()
    return f"removed a file of {_item(path)}"


def _damage_params(run: Run) -> str:
    path = run.logdir / _PARAMS
    if run.random.random() < 0.3:
        path.unlink()
        return "removed"
    content = path.read_bytes()
    path.write_bytes(content[: run.random.randrange(len(content))])
    return "cut"


def _tear_metrics(run: Run) -> str:
    """Appends a part of a row, as a machine that lost power may leave it."""
    with open(run.logdir / _METRICS, "ab") as file:
        file.write(b'{"step":9999999,"loss":1.2')
    return "appended half a row"


def _has_another(run: Run) -> bool:
    undamaged = [step for step in run.checkpoints() if step not in run.damaged]
    return len(undamaged) >= 2 and undamaged[-1] == run.checkpoints()[-1]


def _has_params(run: Run) -> bool:
    return (run.logdir / _PARAMS).exists()


def _has_metrics(run: Run) -> bool:
    return (run.logdir / _METRICS).exists()


DAMAGE = (
    Fault("checkpoint cut", _truncate, needs=_has_another),
    Fault("checkpoint bit flipped", _flip_a_byte, needs=_has_another),
    Fault("checkpoint file removed", _remove, needs=_has_another),
    Fault("params.txt damaged", _damage_params, needs=_has_params),
    Fault("metrics.jsonl torn", _tear_metrics, needs=_has_metrics),
)
