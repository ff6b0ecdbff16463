"""Flags of plans: the file of a program, generation, loads, and how programs are compiled."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence

from absl import flags

from lingvo_gshard.core import UserError, cached, declared
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.flags.definitions import Flags, integer, refuse, switch
from lingvo_gshard.tools.flags.options import option_flags, read_options
from lingvo_gshard.wings.planning.compiling.cache import CompilationCache, Settings, using_settings
from lingvo_gshard.wings.planning.generation import GenerationOptions
from lingvo_gshard.wings.planning.loads.rating import LoadsOptions
from lingvo_gshard.wings.planning.programs.planned import MemoryPatterns, ProgramFacts
from lingvo_gshard.wings.planning.training.job import JobOptions

# The precision of the weights of a config that is planned to generate.
PRECISION = "bfloat16_weights"
# The user's directory of the cache of compiled programs.
_NAME = "plans"
_GENERATION_FLAGS = ("batch", "largest_batch", "prompt", "every_layer")
_NOT_WITH_GENERATION = ("search", "tokens", "html", "calibration", "compile_options")


# --generate and the flags that only apply to it.
GENERATION_FLAGS: Flags = dict(
    generate=switch(
        "Plans generation with a language model, not training: a step of decoding, and prefill."
    ),
    **option_flags(
        GenerationOptions(),
        notes=dict.fromkeys(("batch", "prompt", "every_layer"), "With --generate."),
    ),
    largest_batch=switch(
        "With --generate, searches the largest batch that fits in place of --batch."
    ),
)


def check_generation_flags(values: flags.FlagValues) -> None:
    """Raises ValueError if flags of generation and of other plans are mixed."""
    if not values.generate:
        refuse(values, _GENERATION_FLAGS, "applies to --generate, which is not given")
        return
    if values.largest_batch and values["batch"].present:
        raise UserError(
            f"--batch={values.batch} and --largest_batch both say how many texts are decoded "
            "together; give one of them"
        )
    refuse(values, _NOT_WITH_GENERATION, "does not apply to --generate; give one of them")


# Flags that plan something else than a training step of an experiment.
_NOT_WITH_LOADS = ("generate", "search", "budget", "plan")


def check_loads_flags(values: flags.FlagValues) -> None:
    """Raises UserError if --loads is mixed with plans of anything but a training step."""
    read_options(values, LoadsOptions)
    if values.loads is None:
        return
    why = f"does not go with --loads={values.loads}, which is for a training step of an experiment"
    refuse(values, _NOT_WITH_LOADS, why)


_ONLY_HERE = ("weights", "moments", "step_tokens", "kernel_flops")
# Other flags that also apply to a program in a file.
_ALSO_HERE = ("topology", "mesh", "tokens", "json", "html", "goodput")
_WITH_GOODPUT = tuple(declared(JobOptions))


def program_flags() -> Flags:
    """Returns the flags that only apply to a program in a file."""
    matched = {
        flag: f"Of a file of jax.export: regular expression that finds the arguments that are "
        f"{what} by their names, such as 'state.params'; by default they have their usual names."
        for flag, what in (("weights", "weights"), ("moments", "optimizer state"))
    }
    tokens = integer("Of a program in a file: tokens of a batch.", least=1)
    kernel_flops = (
        "Of a program in a file: FLOPs of one call on one device of kernels whose products are not "
        "in the program, such as 'my_kernel=1.5e12,other=3e9'. The names are regular expressions."
    )
    return dict(**matched, step_tokens=tokens, kernel_flops=kernel_flops)


def program_path(argv: list[str], subcommands: Sequence[str]) -> tuple[str, list[str]]:
    """Returns the path of a program that the command is given, or "", and the other arguments.

    The path is the first argument or the last. A first argument is a path and no subcommand if it
    has a dot or a slash, or exists.
    """
    *others, last = argv
    is_value = others and others[-1].startswith("--") and "=" not in others[-1]
    if len(others) > 1 and not last.startswith("-") and (not is_value or others[-1] == "--json"):
        if others[1].startswith("-"):
            return last, others
    first = next(iter(argv[1:]), "-")
    is_path = "." in first or os.sep in first or os.path.exists(first)
    if first.startswith("-") or first in subcommands or not is_path:
        return "", argv
    return first, [argv[0], *argv[2:]]


def check_program_flags(values: flags.FlagValues, path: str) -> None:
    """Raises ValueError for flags that do not apply to a program, or only to one."""
    if not path:
        refuse(values, _ONLY_HERE, "applies to the file of a program, which is not given")
        return
    valid = (*_ALSO_HERE, *_ONLY_HERE)
    others = [name for name in values if name not in (*valid, *_WITH_GOODPUT)]
    shown = ", ".join(f"--{flag}" for flag in valid)
    refuse(values, others, f"does not apply to the program {path}, only {shown}")


def program_facts(values: flags.FlagValues) -> ProgramFacts:
    """Returns what the flags say about a program."""
    return ProgramFacts(
        mesh=values.mesh,
        patterns=MemoryPatterns(values.weights, values.moments),
        step_tokens=values.step_tokens,
        kernel_flops=kernel_flops(values.kernel_flops),
    )


def kernel_flops(text: str | None) -> dict[str, float]:
    """Returns what --kernel_flops says. Raises UserError if it is not understood."""
    found = {}
    for part in filter(None, (text or "").split(",")):
        name, _, number = part.rpartition("=")
        try:
            found[name] = float(number)
        except ValueError:
            found[name] = 0.0
        if not name or not 0 < found[name] < float("inf"):
            raise UserError(
                f"--kernel_flops={text}: {part!r} was given; expected a kernel's name and the "
                "FLOPs of one call, such as my_kernel=1.5e12"
            )
    return found


# The flags of `using_flags`.
COMPILING_FLAGS: Flags = dict(
    compilation_cache="Directory that keeps compiled programs for later plans; '' disables "
    "it. Default: lingvo_gshard/plans in $XDG_CACHE_HOME or ~/.cache.",
    generate_code=switch(
        "Has the compiler generate the code of a device, too. Takes about ten times as long, "
        "and adds the bytes of a TPU's code to the peak."
    ),
)


@contextlib.contextmanager
def using_flags(values: flags.FlagValues, console: output.Console) -> Iterator[None]:
    """Has plans inside a `with` block compile as the flags say, and says what the cache did."""
    settings = compiling_settings(values)
    cache = settings.cache
    with using_settings(settings):
        yield
    if cache and (cache.read or cache.compiled):
        console.say(_counts(cache))


def compiling_settings(values: flags.FlagValues) -> Settings:
    """Returns how the flags say that plans are compiled."""
    cache = None
    if values.compilation_cache != "":
        directory = cached.directory(_NAME, values.compilation_cache)
        cache = CompilationCache(pathlib.Path(directory))
    return Settings(cache, values.generate_code)


def _counts(cache: CompilationCache) -> str:
    damaged = f", {cache.damaged} of them because a file was damaged" if cache.damaged else ""
    return (
        f"Compilation cache {cache.directory}: {cache.read} read, {cache.compiled} "
        f"compiled{damaged}."
    )
