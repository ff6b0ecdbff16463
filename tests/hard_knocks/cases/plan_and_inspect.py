"""Plans, inspections and reports of machines, runs and files that do not exist or do not fit."""

import json

from tests.hard_knocks.case import Case
from tests.hard_knocks.prepare import cut, folder, replace, searched, trained, write

_PLAN = "gshard-plan --experiment=test.tiny "
_TRAIN = "gshard-train --experiment=test.tiny --logdir=run "
# Writes the file of a search for eight devices.
_FOUND = searched("found.json", "data=8", "cpu:8")

_PLAN_EXPERTS = "gshard-plan --experiment=translation.quickstart --topology=cpu:4 "
_LOADS_EXPECTED = (
    "expected a file that gshard-experts report --json or gshard-experts watched --json wrote, or "
    "the routers.jsonl of a run"
)
_LAYER = "encoder.layers[1].feed_forward"


def _record(layer: str, choices: list[int]) -> dict:
    """Returns a record of step 50 in which two experts compute each token."""
    return {
        "step": 50,
        "layer": layer,
        "router": "Top2Router",
        "experts_per_token": 2.0,
        "tokens": 40,
        "choices": choices,
        "kept": choices,
        "dropped_share": 0.0,
        "load_entropy": 1.0,
    }


def _loads(*records: dict) -> tuple:
    return (write("load.json", json.dumps(records)),)


CASES = (
    Case(
        "a verification without a mesh",
        "gshard-verify --experiment=test.tiny",
        error="--mesh is missing, such as --mesh=data=4,model=2",
    ),
    Case(
        "a verification with a negative tolerance",
        "gshard-verify --experiment=test.tiny --mesh=data=2 --tolerance=-1",
        error="--tolerance=-1: ...",
    ),
    Case(
        "a report without a run",
        "gshard-report",
        error="--logdir is missing: the directory that gshard-train wrote",
    ),
    Case(
        "a report on a directory that is not there",
        "gshard-report --logdir=run --html=report.html",
        error="--logdir=run: there is no such directory. Train one first: gshard-train "
        "--experiment=NAME --logdir=run",
    ),
    Case(
        "a report on an empty directory",
        "gshard-report --logdir=run",
        given=(folder("run"),),
        error="--logdir=run: there is no run in it (no params.txt). Train one first: gshard-train "
        "--experiment=NAME --logdir=run",
    ),
    Case(
        "a report on a run without metrics",
        "gshard-report --logdir=run",
        given=(trained("run"), cut("run/metrics.jsonl", 0)),
        error="--logdir=run: the run of test.tiny has no metrics yet: metrics.jsonl has no row",
    ),
    Case(
        "a report to a directory that is not there",
        "gshard-report --logdir=run --html=no/report.html",
        given=(trained("run"),),
        error="--html=no/report.html cannot be written: there is no directory no; create it first, "
        "or name another one",
    ),
    Case(
        "a report on a damaged run",
        "gshard-report --logdir=run --html=report.html",
        given=(
            trained("run"),
            cut("run/metrics.jsonl", 0.5),
            cut("run/launches.jsonl", 0.5),
            cut("run/sharding.json", 0.5),
            cut("run/compilations.jsonl", 0.5),
            cut("run/params.txt", 0.5),
        ),
        changes=("report.html",),
        prints=("Report on run written to report.html",),
    ),
    Case(
        "an unknown writer",
        "gshard-train --experiment=test.tiny --logdir=run --writer=wanbd",
        error="--writer=wanbd is unknown. Did you mean 'wandb'?",
    ),
    Case(
        "a plan without a topology",
        "gshard-plan --experiment=test.tiny",
        error="--topology is missing, such as v3:32x32; --list_topologies shows all",
    ),
    Case(
        "an unknown kind of chip",
        _PLAN + "--topology=v33:2x2",
        error="--topology=v33:2x2: unknown kind of chip 'v33'; expected such as ... Did you mean "
        "'v3'?",
    ),
    Case(
        "a slice that does not exist",
        _PLAN + "--topology=v3:3x3",
        error="--topology=v3:3x3: a host has 2x2 chips, so the first two sizes must be even; "
        "expected such as v3:32x32",
    ),
    Case(
        "a mesh of another size than the topology",
        _PLAN + "--topology=cpu:8 --mesh=data=4",
        error="--mesh=data=4 has 4 devices, but --topology=cpu:8 has 8; expected axes whose sizes "
        "multiply to that, such as data=8",
    ),
    Case(
        "a page that cannot be written",
        _PLAN + "--topology=cpu:8 --html=/dev/null/plan.html",
        error="--html=/dev/null/plan.html cannot be written: ...",
    ),
    Case(
        "a search with a mesh of its own",
        _PLAN + "--topology=cpu:8 --mesh=data=8 --search",
        error="--mesh=data=8 does not go with --search, which finds meshes and strategies itself",
    ),
    Case(
        "a calibration that is missing",
        _PLAN + "--topology=cpu:1 --calibration=c.json",
        error="--calibration=c.json: cannot be read: No such file or directory",
    ),
    Case(
        "a calibration that is none",
        _PLAN + "--topology=cpu:1 --calibration=c.json",
        given=(write("c.json", "{}"),),
        error="--calibration=c.json: not a calibration: ... gshard-train --profile_steps --plan "
        "writes one",
    ),
    Case(
        "a search with a calibration",
        _PLAN + "--topology=cpu:8 --calibration=c.json --search",
        error="--calibration=c.json does not go with --search, which rates by published "
        "efficiencies; plan what it finds with --calibration",
    ),
    Case(
        "steps to profile that are no steps",
        _TRAIN + "--profile_steps=20-23",
        error="--profile_steps=20-23: expected the first and the last step to profile, such as "
        "20:23",
    ),
    Case(
        "steps to profile after the end",
        _TRAIN + "--steps=22 --profile_steps=20:23",
        error="--profile_steps=20:23: the run ends with step 22. Profile earlier steps, or train "
        "longer with --steps",
    ),
    Case(
        "a plan that is missing",
        "gshard-train --logdir=run --plan=plan.json",
        error="--plan=plan.json: cannot be read: No such file or directory",
    ),
    Case(
        "a plan that is a calibration",
        "gshard-train --logdir=run --plan=plan.json",
        given=(write("plan.json", "{}"),),
        error="--plan=plan.json: neither a plan nor a search; gshard-plan --json writes both",
    ),
    Case(
        "a plan that is Params",
        "gshard-train --logdir=run --plan=run.txt",
        given=(write("run.txt", "name : 'test.tiny'\n"),),
        error="--plan=run.txt: not JSON (...). Expected a file written by gshard-plan --json",
    ),
    Case(
        "a plan that is cut off",
        "gshard-train --logdir=run --plan=found.json",
        given=(_FOUND, cut("found.json")),
        error="--plan=found.json: not JSON (Input data was truncated). Expected a file written by "
        "gshard-plan --json",
    ),
    Case(
        "a plan with a value that is none",
        "gshard-train --logdir=run --plan=found.json",
        given=(
            _FOUND,
            replace("found.json", "step.clip_norm : 1.0", "step.clip_norm : -1.0"),
        ),
        error="--plan=found.json: its Params cannot be read: line ...: step.clip_norm: ...",
    ),
    Case(
        "a plan of a later version",
        "gshard-train --logdir=run --plan=found.json",
        given=(write("found.json", '{"search_format": 9}'),),
        error="--plan=found.json: search format 9, but this version reads format 1. Search again "
        "with this version",
    ),
    Case(
        "a plan with another mesh than its machine",
        "gshard-train --logdir=run --plan=found.json",
        given=(searched("found.json", "data=4", "cpu:8"),),
        error="--plan=found.json: its mesh data=4 has 4 devices, but cpu:8 has 8. Plan again",
    ),
    Case(
        "a plan for GPUs that are not here",
        "gshard-train --logdir=run --plan=found.json",
        given=(searched("found.json", "data=8", "gpu:h100:1x8"),),
        environment={"JAX_PLATFORMS": ""},
        error="--plan=found.json is for 8 devices of gpu:h100:1x8, but there are none. Plan again "
        "for the machine that you have, or set JAX_PLATFORMS=cpu in the environment to try the "
        "plan on virtual devices",
    ),
    Case(
        "a plan and another experiment",
        _TRAIN.replace("test.tiny", "translation.quickstart") + "--plan=found.json",
        given=(_FOUND,),
        error="--plan=found.json is of the experiment test.tiny, not translation.quickstart; "
        "leave out --experiment",
    ),
    Case(
        "a plan and another mesh",
        "gshard-train --logdir=run --plan=found.json --mesh=data=4,model=2",
        given=(_FOUND,),
        error="--mesh=data=4,model=2 contradicts --plan=found.json, which has data=8; leave out "
        "one of them",
    ),
    Case(
        "a plan and another strategy",
        "gshard-verify --plan=found.json --strategy=fsdp",
        given=(_FOUND,),
        error="--strategy=fsdp contradicts --plan=found.json, which has data; leave out one of "
        "them",
    ),
    Case(
        "a plan and a setting of its sharding",
        "gshard-inspect --plan=found.json --gin_param=\"sharding.strategy = 'fsdp'\"",
        given=(_FOUND,),
        error="sharding.strategy = 'fsdp' contradicts --plan=found.json, which has 'data'; leave "
        "out one of them",
    ),
    Case(
        "a plan on one device",
        "gshard-train --logdir=run --plan=found.json --runtime=local",
        given=(_FOUND,),
        error="--plan=found.json needs --runtime=spmd; the local runtime has one device",
    ),
    Case(
        "a profile beside a search that compiled nothing",
        "gshard-train --logdir=run --plan=found.json --profile_steps=2:3",
        given=(_FOUND,),
        error="--plan=found.json has no times to compare a profile with, since the search compiled "
        "nothing. Search with `search_compilations=1` or more",
    ),
    Case(
        "a replay of a plan",
        "gshard-train --logdir=run --plan=found.json --replay_step=3",
        error="--plan=found.json cannot be combined with --replay_step=3: a run is replayed with "
        "its own Params",
    ),
    Case(
        "a profile of another benchmark",
        "gshard-bench input --profile=profiles",
        error="--profile=profiles applies to `step`, not to `input`",
    ),
    Case(
        "a comparison of one plan",
        "gshard-plan diff a.json",
        error="gshard-plan diff compares two files written by --json; 1 was given",
    ),
    Case(
        "a comparison with a plan that is missing",
        "gshard-plan diff a.json b.json",
        error="a.json: cannot be read: No such file or directory",
    ),
    Case(
        "a comparison with a file that is no plan",
        "gshard-plan diff a.json a.json",
        given=(write("a.json", "{}"),),
        error="a.json...",
    ),
    Case(
        "a program to standard output",
        "gshard-inspect --experiment=test.tiny --mesh=data=2 --program=-",
        error="--program=-: a program is written to a file, not to standard output",
    ),
    Case(
        "a program compiled and saved at once",
        "gshard-inspect --experiment=test.tiny --mesh=data=2 --function=init_state --compile "
        "--program=init.zip",
        prints=("init_state for data=2 saved in init.zip", "memory per device: "),
        changes=("init.zip",),
    ),
    Case(
        "activations of a layer that does not exist",
        "gshard-inspect --experiment=test.tiny --mesh=data=2 --activations=hiden",
        error="--activations: no layer is named 'hiden'. Did you mean 'hidden'?",
    ),
    Case(
        "activations on one device",
        "gshard-inspect --experiment=test.tiny --mesh=data=1 --activations=hidden",
        error="--activations: nothing is split on --mesh=data=1; expected a mesh of several "
        "devices, such as data=4,model=2",
    ),
    Case(
        "loads that are not there",
        _PLAN_EXPERTS + "--loads=load.json",
        error="--loads=load.json: cannot be read: No such file or directory",
    ),
    Case(
        "loads that are no JSON",
        _PLAN_EXPERTS + "--loads=load.json",
        given=(write("load.json", "expert 1: 50%"),),
        error=f"--loads=load.json: not JSON (JSON is malformed: ...); {_LOADS_EXPECTED}",
    ),
    Case(
        "metrics for loads",
        _PLAN_EXPERTS + "--loads=metrics.json",
        given=(write("metrics.json", '{"step": 1, "loss": 2.5}'),),
        error="--loads=metrics.json: no loads of routers: Object missing required field `layers`; "
        + _LOADS_EXPECTED,
    ),
    Case(
        "negative loads",
        _PLAN_EXPERTS + "--loads=load.json",
        given=_loads(_record(_LAYER, [9, -4, 1, 1, 1, 1, 1, 1])),
        error=f"--loads=load.json: {_LAYER}, step 50: choices[1] is -4; expected a count, 0 or "
        "more",
    ),
    Case(
        "loads of a model with other layers",
        _PLAN_EXPERTS + "--loads=load.json",
        given=_loads(_record("encoder.layers[3].feed_forward", [10] * 8)),
        error="--loads=load.json has loads of encoder.layers[3].feed_forward, which is no layer "
        f"with experts of translation.quickstart. Did you mean '{_LAYER}'? translation.quickstart "
        "has 2 layers with experts, the file 1: are they of another model?",
    ),
    Case(
        "loads of a model with more experts",
        _PLAN_EXPERTS + "--loads=load.json",
        given=_loads(*(_record(_LAYER.replace("en", side), [5] * 16) for side in ("en", "de"))),
        error=f"--loads=load.json has loads of 16 experts in {_LAYER}, where "
        "translation.quickstart has 8: expected the loads of the same model",
    ),
    Case(
        "loads for a model without experts",
        "gshard-plan --experiment=test.tiny --topology=cpu:1 --loads=load.json",
        given=_loads(_record(_LAYER, [10] * 8)),
        error="--loads=load.json: test.tiny has no layer with experts",
    ),
    Case(
        "more copies than places",
        _PLAN_EXPERTS + "--loads=load.json --replicas=25",
        given=_loads(*(_record(_LAYER.replace("en", side), [10] * 8) for side in ("en", "de"))),
        says="...gshard-plan: error: --replicas=25: the 8 experts of "
        f"{_LAYER} are divided over 4 devices; expected at most 24, which is every expert on every "
        "device\n",
        code=1,
        slow=True,
    ),
    Case(
        "replicas without loads",
        _PLAN_EXPERTS + "--replicas=8",
        error="--replicas=8 applies to --loads, which is not given",
    ),
    Case(
        "a negative number of copies",
        _PLAN_EXPERTS + "--loads=load.json --replicas=-1",
        error="--replicas=-1: -1 is not a non-negative integer",
    ),
    Case(
        "loads for a search",
        _PLAN_EXPERTS + "--loads=load.json --search",
        error="--search does not go with --loads=load.json, which is for a training step of an "
        "experiment",
    ),
    Case(
        "experts placed without a plan",
        "gshard-experts place --logdir=run --output=new",
        given=(trained("run", "translation"),),
        error="--plan is missing: the file that gshard-plan --loads --json wrote",
    ),
    Case(
        "experts placed by something else",
        "gshard-experts place --logdir=run --output=new --plan=load.json",
        given=(trained("run", "translation"), *_loads(_record(_LAYER, [10] * 8))),
        error="load.json: not a plan: Expected `object`, got `array`",
    ),
)
