"""Plans, inspections, benchmarks and expert tools with wrong names, files and numbers."""

from tests.hard_knocks.case import Case
from tests.hard_knocks.prepare import folder, trained, write

_PLAN = "gshard-plan --experiment=gshard_paper.moe_512e_12l "
_INSPECT = "gshard-inspect --experiment=translation.quickstart "

CASES = (
    Case(
        "a plan of nothing",
        "gshard-plan",
        error="--experiment is missing; gshard-train --list shows the experiments",
    ),
    Case(
        "a plan without a topology",
        _PLAN,
        error="--topology is missing, such as v3:32x32; --list_topologies shows all",
    ),
    Case(
        "a plan of an unknown experiment",
        "gshard-plan --experiment=gshard_paper.moe_513e_12l --topology=v3:16x16",
        error="Unknown experiment 'gshard_paper.moe_513e_12l'. Did you mean "
        "'gshard_paper.moe_512e_12l'?",
    ),
    Case(
        "a batch of texts without generation",
        _PLAN + "--topology=v3:16x16 --batch=64",
        error="--batch=64 applies to --generate, which is not given",
    ),
    Case(
        "a batch and the largest one",
        _PLAN + "--topology=v3:16x16 --generate --batch=8 --largest_batch",
        error="--batch=8 and --largest_batch both say how many texts are decoded together; give "
        "one of them",
    ),
    Case(
        "the largest batch without generation",
        _PLAN + "--topology=v3:16x16 --largest_batch",
        error="--largest_batch applies to --generate, which is not given",
    ),
    Case(
        "generation with the flags of training",
        _PLAN + "--topology=v3:16x16 --generate --tokens=1e9",
        error="--tokens=1000000000.0 does not apply to --generate; give one of them",
    ),
    Case(
        "generation with a model that translates",
        _PLAN + "--topology=cpu:1 --mesh=data=1 --generate",
        error="--generate plans language models, and TranslationTask, the task of "
        "gshard_paper.moe_512e_12l, translates a source",
        slow=True,
    ),
    Case(
        "an unknown chip",
        _PLAN + "--topology=v33:16x16",
        error="--topology=v33:16x16: unknown kind of chip 'v33'; expected such as v3:32x32,"
        " v4:4x4x8, v5p:8x8x8*4 (four slices), cpu:8 or gpu:h100:8x4 (hosts x GPUs of one host), "
        "or a cloud's name such as v5litepod-16, v4-32, a3-highgpu-8g, p5.48xlarge, "
        "ND96isr_H100_v5 and 8xH100. Did you mean 'v3'?",
    ),
    Case(
        "a topology without a shape",
        _PLAN + "--topology=v3",
        error="--topology=v3: '' is not a shape; expected 2 sizes, such as v3:32x32",
    ),
    Case(
        "a topology of a broken shape",
        _PLAN + "--topology=v3:16x",
        error="--topology=v3:16x: '16x' is not a shape; expected 2 sizes, such as v3:32x32",
    ),
    Case(
        "a topology of no chips",
        _PLAN + "--topology=v3:0x16",
        error="--topology=v3:0x16: '0x16' is not a shape; expected 2 sizes, such as v3:32x32",
    ),
    Case(
        "a topology of negative size",
        _PLAN + "--topology=v3:-4x4",
        error="--topology=v3:-4x4: '-4x4' is not a shape; expected 2 sizes, such as v3:32x32",
    ),
    Case(
        "a topology of a million chips a side",
        _PLAN + "--topology=v3:1000000x1000000",
        error="--topology=v3:1000000x1000000: a pod of TPU v3 has 1,024 chips, 32x32; "
        "choose a smaller shape",
    ),
    Case(
        "an empty topology",
        _PLAN + "--topology=",
        error="--topology is missing, such as v3:32x32; --list_topologies shows all",
    ),
    Case(
        "a mesh of another size than the topology",
        _PLAN + "--topology=v3:16x16 --mesh=data=7",
        error="--mesh=data=7 has 7 devices, but --topology=v3:16x16 has 512; expected axes "
        "whose sizes multiply to that, such as data=512",
    ),
    Case(
        "a mesh without the strategy's axis in a plan",
        _PLAN + "--topology=v3:16x16 --mesh=dta=512",
        error="--strategy=expert needs axis 'data', which --mesh=dta=512 lacks. Did you "
        "mean --mesh=data=512?",
    ),
    Case(
        "an unknown strategy in a plan",
        _PLAN + "--topology=v3:16x16 --strategy=exprt",
        error="--strategy=exprt: unknown strategy 'exprt'. Did you mean 'expert'? Join "
        "several by '_', or write a table such as 'B,G->data; H->model'.",
    ),
    Case(
        "negative tokens",
        _PLAN + "--topology=v3:16x16 --tokens=-1",
        error="--tokens=-1: -1.0 is not a non-negative number",
    ),
    Case(
        "tokens that are no number",
        _PLAN + "--topology=v3:16x16 --tokens=many",
        error="--tokens=many: expected a number, such as 0.5 or 1e12",
    ),
    Case(
        "infinite tokens",
        _PLAN + "--topology=v3:16x16 --tokens=inf",
        error="--tokens=inf; expected a finite number",
    ),
    Case(
        "tokens that are NaN",
        _PLAN + "--topology=v3:16x16 --tokens=nan",
        error="--tokens=nan; expected a finite number",
    ),
    Case(
        "negative remedies",
        _PLAN + "--topology=v3:16x16 --remedies=-1",
        error="--remedies=-1: -1 is not a non-negative integer",
    ),
    Case(
        "a plan into a directory that is not there",
        _PLAN + "--topology=v3:16x16 --json=no/plan.json",
        error="--json=no/plan.json cannot be written: there is no directory no; create it "
        "first, or name another one",
    ),
    Case(
        "a page into a directory",
        _PLAN + "--topology=v3:16x16 --html=dir",
        given=(folder("dir"),),
        error="--html=dir cannot be written: it is a directory; a file was expected",
    ),
    Case(
        "a comparison of one plan",
        "gshard-plan diff a.json",
        error="gshard-plan diff compares two files written by --json; 1 was given",
    ),
    Case(
        "a comparison of plans that are not there",
        "gshard-plan diff a.json b.json",
        error="a.json: cannot be read: No such file or directory",
    ),
    Case(
        "a comparison of what is no JSON",
        "gshard-plan diff a.json a.json",
        given=(write("a.json", "x"),),
        error="a.json: not JSON (JSON is malformed: invalid character (byte 0)). Expected a"
        " file written by gshard-plan --json",
    ),
    Case(
        "a comparison of what is no plan",
        "gshard-plan diff a.json a.json",
        given=(write("a.json", "{}"),),
        error="a.json: not a plan: Object missing required field `format`",
    ),
    Case(
        "a comparison of directories",
        "gshard-plan diff a a",
        given=(folder("a"),),
        error="a: cannot be read: Is a directory",
    ),
    Case(
        "a comparison of empty files",
        "gshard-plan diff a.json a.json",
        given=(write("a.json", ""),),
        error="a.json: not JSON (Input data was truncated). Expected a file written by "
        "gshard-plan --json",
    ),
    Case(
        "an unknown subcommand of the planner",
        "gshard-plan dif a.json b.json",
        error="the subcommand 'dif' is unknown. Did you mean 'diff'? Without one, flags or "
        "the file of a program say what to plan, see --help",
    ),
    Case(
        "an inspection of nothing",
        "gshard-inspect",
        error="--experiment is missing; gshard-train --list shows the experiments",
    ),
    Case(
        "an inspection of a mesh without sizes",
        _INSPECT + "--mesh=data",
        error="--mesh=data: 'data'; expected axes with their sizes, such as data=4,model=2",
    ),
    Case(
        "a program without compiling",
        _INSPECT + "--program=p",
        error="--mesh is missing, such as --mesh=data=4,model=2",
    ),
    Case(
        "a program into a directory that is not there",
        _INSPECT + "--compile --program=no/p --mesh=data=2",
        error="--program=no/p cannot be written: there is no directory no; create it first,"
        " or name another one",
    ),
    Case(
        "a benchmark that is not there",
        "gshard-bench stp",
        error="the subcommand 'stp' is unknown. Did you mean 'step'?",
    ),
    Case(
        "a benchmark of nothing",
        "gshard-bench",
        error="the subcommand is missing. Valid: card, exported, fill, input, step.",
    ),
    Case(
        "a benchmark of the repository",
        "gshard-bench decode --repeats=1",
        error="the subcommand 'decode' is unknown. Valid: card, exported, fill, input, step. "
        "The repository has python -m benchmarks decode",
    ),
    Case(
        "prepared data to read that is not named",
        "gshard-bench input",
        error="--prepared is missing: the directory that gshard-prepare wrote. The repository has "
        "python -m benchmarks input for made text",
    ),
    Case(
        "a card to fill with nothing",
        "gshard-bench fill --topology=gpu:h100:1x1 --folder=dense",
        error="fill needs an experiment, such as --experiment=language_model.one_gpu_dense or "
        "--experiment=language_model.one_gpu_experts",
    ),
    Case(
        "a setting to grow that is no number",
        "gshard-bench fill --topology=cpu:1 --folder=dense "
        "--experiment=language_model.one_gpu_dense --grow=step.precision",
        error="--grow=step.precision is 'bfloat16' in language_model.one_gpu_dense; expected a "
        "positive integer, such as task.decoder.num_layers or input.batch_rows",
    ),
    Case(
        "a card to measure without its folder",
        "gshard-bench card dense",
        error="dense has no train_step.zip; gshard-bench fill --folder=dense writes it",
    ),
    Case(
        "a flag of fill with card",
        "gshard-bench card dense --share=0.5",
        error="--share=0.5 applies to `fill`, not to `card`",
    ),
    Case(
        "an expert tool that is not there",
        "gshard-experts reprt",
        error="the subcommand 'reprt' is unknown. Did you mean 'report'?",
    ),
    Case(
        "no expert tool",
        "gshard-experts",
        error="the subcommand is missing. Valid: place, prune, report, upcycle, watched.",
    ),
    Case(
        "experts of nothing",
        "gshard-experts report",
        error="--logdir is missing: the directory that gshard-train wrote",
    ),
    Case(
        "experts of a directory that is not there",
        "gshard-experts report --logdir=run",
        error="--logdir=run: there is no such directory. Train one first: gshard-train "
        "--experiment=NAME --logdir=run",
    ),
    Case(
        "upcycling a directory that is not there",
        "gshard-experts upcycle --logdir=no --output=new",
        error="--experts is missing: the number of experts per layer, such as --experts=8",
    ),
    Case(
        "no share of experts to keep",
        "gshard-experts prune --logdir=run --output=new --keep=0",
        given=(trained("run", "translation"),),
        error="--keep=0; more than 0 and at most 1 was expected",
    ),
    Case(
        "pruning into the same directory",
        "gshard-experts prune --logdir=run --output=run",
        given=(trained("run", "translation"),),
        error="--output=run exists already; give the name of a new directory",
    ),
    Case(
        "a criterion of pruning that is not there",
        "gshard-experts prune --logdir=run --output=new --by=size",
        given=(trained("run", "translation"),),
        error="--by=size is unknown. Valid: gate, load.",
    ),
)
