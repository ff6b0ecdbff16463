"""Exports in formats that do not exist, of runs that are not there, to places that are taken."""

from tests.hard_knocks.case import Case
from tests.hard_knocks.prepare import folder, remove, trained, write

_EXPORT = "gshard-export --logdir=run --output=model "
_SAFETENSORS = _EXPORT + "--format=safetensors"
_RUN = trained("run")

CASES = (
    Case(
        "an export without a directory",
        "gshard-export --logdir=run --format=safetensors",
        given=(_RUN,),
        error="--output is missing: the directory to write",
    ),
    Case(
        "an export without a format",
        _EXPORT,
        given=(_RUN,),
        error="--format is missing: safetensors...",
    ),
    Case(
        "an unknown format",
        _EXPORT + "--format=safetensor",
        given=(_RUN,),
        error="--format=safetensor is unknown. Did you mean 'safetensors'?",
    ),
    Case(
        "a decoder of a task that decodes nothing",
        _EXPORT + "--format=saved_model",
        given=(_RUN,),
        error="test.tiny has the task TinyTask, which decodes nothing; --format=safetensors writes "
        "its weights",
    ),
    Case(
        "a beam for an export of weights",
        _SAFETENSORS + " --beam_size=4",
        given=(_RUN,),
        error="--format=safetensors writes weights, which do not depend on a decoder: --beam_size "
        "does not apply",
    ),
    Case(
        "sizes that are no numbers",
        _EXPORT + "--format=stablehlo --rows=1,eight",
        given=(_RUN,),
        error="--rows=1,eight: numbers were expected, such as --rows=1,8,32",
    ),
    Case(
        "sizes that are not ascending",
        _EXPORT + "--format=stablehlo --lengths=64,32",
        given=(_RUN,),
        error="--lengths=64,32: ascending sizes were expected, such as --lengths=1,8,32",
    ),
    Case(
        "a beam beyond the vocabulary for an export",
        _EXPORT + "--format=stablehlo --beam_size=1000",
        given=(trained("run", "translation"),),
        error="--beam_size=1000: 1 to 300 was expected, the size of the vocabulary",
    ),
    Case(
        "an export of longer texts than the model takes",
        _EXPORT + "--format=stablehlo --lengths=32,1000",
        given=(trained("run", "translation"),),
        error="--lengths=32,1000: the model takes texts of 256 tokens at most",
        slow=True,
    ),
    Case(
        "an export of no run",
        _SAFETENSORS,
        error="--logdir=run: there is no such directory. Train one first: gshard-train "
        "--experiment=NAME --logdir=run",
    ),
    Case(
        "an export of a run without a checkpoint",
        _SAFETENSORS,
        given=(_RUN, remove("run/checkpoints")),
        error="--logdir=run: the run of test.tiny has no checkpoint yet. ...",
    ),
    Case(
        "an export into a directory with files",
        _SAFETENSORS,
        given=(_RUN, folder("model"), write("model/mine", "kept")),
        error="--output=model exists and is not empty; give the name of a new directory",
    ),
    Case(
        "an export onto a file",
        _SAFETENSORS,
        given=(_RUN, write("model", "kept")),
        error="--output=model is a file; give the name of a new directory",
    ),
    Case(
        "an export into a directory that does not exist",
        "gshard-export --logdir=run --output=mdoels/new --format=safetensors",
        given=(_RUN,),
        error="--output=mdoels/new: there is no directory .../mdoels; create it first, or name "
        "another one",
    ),
    Case(
        "an export where no directory can be made",
        "gshard-export --logdir=run --output=/proc/model --format=safetensors",
        given=(_RUN,),
        error="--output=/proc/model cannot be written: ...",
    ),
    Case(
        "a disk that is full in the middle of an export",
        _SAFETENSORS,
        given=(_RUN,),
        limits={"RLIMIT_FSIZE": 512},
        error="--output=model cannot be written: file too large",
    ),
)
