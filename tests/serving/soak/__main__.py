"""Serves 300 honest clients among hostile ones, with restarts and a compiler that hangs.

    python -m tests.serving.soak --seconds=600 --clients=300

`make soak-serve` runs this. A tiny model is trained and served on this machine. Honest clients
compare every answer with that of the translator without a server. Hostile ones send endless
headers, hold connections half open, leave in the midst, do not read, ask for rare options, and send
heads and fields that nobody needs.

Exit code: 0 only if no honest question was lost or answered wrongly, memory stayed flat, the server
logged no traceback and ended with 0 at every stop.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import time

from tests.serving.soak.soak import Outcome, Plan, soak, train


def _arguments() -> argparse.Namespace:
    plan = Plan()
    parser = argparse.ArgumentParser(
        "python -m tests.serving.soak", None, __doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=plan.seed, help="seed of what clients do")
    parser.add_argument("--seconds", type=float, default=plan.seconds, help="how long they do it")
    parser.add_argument("--clients", type=int, default=plan.clients, help="honest clients")
    parser.add_argument("--attackers", type=int, default=plan.attackers, help="hostile clients")
    parser.add_argument("--json", metavar="FILE", help="write what was found as JSON")
    return parser.parse_args()


def main() -> int:
    """Runs the soak and returns its exit code."""
    values, began = _arguments(), time.monotonic()
    plan = Plan(
        seed=values.seed,
        seconds=values.seconds,
        clients=values.clients,
        attackers=values.attackers,
    )

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="soak-serve-") as name:
        folder = pathlib.Path(name)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        say("training a tiny model")
        outcome = soak(plan, train(folder), folder, say)
        _show(outcome, say)
        if outcome.problems:
            say(f"the end of the server's log:\n{(folder / 'server.log').read_text()[-3000:]}")
    if values.json:
        record = {"plan": dataclasses.asdict(plan), **_record(outcome)}
        pathlib.Path(values.json).write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    return 1 if outcome.problems else 0


def _record(outcome: Outcome) -> dict:
    tally = outcome.tally
    return {
        "answered": len(tally.seconds),
        "retries": tally.retries,
        "lost": len(tally.lost),
        "wrong": len(tally.wrong),
        "p50_seconds": float(sorted(tally.calm)[len(tally.calm) // 2]) if tally.calm else None,
        "p99_seconds": outcome.p99(tally.calm),
        "p99_seconds_with_restarts": outcome.p99(tally.seconds),
        "memory_growth": outcome.growth,
        "memory_mebibytes": outcome.memory[-1] if outcome.memory else None,
        "descriptors": outcome.descriptors,
        "exit_codes": outcome.exit_codes,
        "stuck_compilers": outcome.stuck_compilers,
        "attacks": outcome.attacks,
        "problems": outcome.problems[:50],
    }


def _show(outcome: Outcome, say) -> None:
    for name, value in _record(outcome).items():
        if name != "problems":
            say(f"{name}: {value:.3f}" if isinstance(value, float) else f"{name}: {value}")
    for text in outcome.problems[:20]:
        say(f"WRONG: {text}")
    say("The soak failed." if outcome.problems else "The soak passed.")


if __name__ == "__main__":
    sys.exit(main())
