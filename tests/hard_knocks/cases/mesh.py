"""Meshes, strategies and runtimes that do not exist, do not match, or do not fit."""

from tests.hard_knocks.case import Case
from tests.hard_knocks.prepare import write

_TRAIN = "gshard-train --experiment=test.tiny --logdir=run "

CASES = (
    Case(
        "a mesh without the strategy's axis",
        _TRAIN + "--mesh=dta=8",
        error="--strategy=expert needs axis 'data', which --mesh=dta=8 lacks. ...",
    ),
    Case(
        "a mesh without sizes",
        _TRAIN + "--mesh=data",
        error="--mesh=data: 'data'; expected axes with their sizes, such as data=4,model=2",
    ),
    Case(
        "an axis of size 0",
        _TRAIN + "--mesh=data=0",
        error="--mesh=data=0: axis 'data' has size 0; expected axes with their sizes, such "
        "as data=4,model=2",
    ),
    Case(
        "an axis of a negative size",
        _TRAIN + "--mesh=data=-2",
        error="--mesh=data=-2: 'data=-2'; expected axes with their sizes, such as data=4,model=2",
    ),
    Case(
        "an axis of a broken size",
        _TRAIN + "--mesh=data=2.5",
        error="--mesh=data=2.5: 'data=2.5'; expected axes with their sizes, such as data=4,model=2",
    ),
    Case(
        "an axis without a name",
        _TRAIN + "--mesh==4",
        error="--mesh==4: '=4'; expected axes with their sizes, such as data=4,model=2",
    ),
    Case(
        "an axis named twice",
        _TRAIN + "--mesh=data=2,data=2",
        error="--mesh=data=2,data=2: axis 'data' is repeated",
    ),
    Case(
        "an empty mesh",
        _TRAIN + "--mesh=",
        error="--mesh is empty; expected axes with their sizes, such as data=4,model=2",
    ),
    Case(
        "a trailing comma",
        _TRAIN + "--mesh=data=2,",
        error="--mesh=data=2,: ''; expected axes with their sizes, such as data=4,model=2",
    ),
    Case(
        "a mesh by shape",
        _TRAIN + "--mesh=2x4",
        error="--mesh=2x4: '2x4'; expected axes with their sizes, such as data=4,model=2",
    ),
    Case(
        "an unknown strategy",
        _TRAIN + "--mesh=data=2 --strategy=exprt",
        error="--strategy=exprt: unknown strategy 'exprt'. Did you mean 'expert'? Join "
        "several by '_', or write a table such as 'B,G->data; H->model'.",
    ),
    Case(
        "a union with an unknown strategy",
        _TRAIN + "--mesh=data=2 --strategy=expert_tensr",
        error="--strategy=expert_tensr: unknown strategy 'tensr'. Did you mean 'tensor'? "
        "Join several by '_', or write a table such as 'B,G->data; H->model'.",
    ),
    Case(
        "a union whose axes lack",
        _TRAIN + "--mesh=data=2 --strategy=expert_tensor",
        error="--strategy=expert_tensor needs axis 'model', which --mesh=data=2 lacks. "
        "Valid: data.",
    ),
    Case(
        "a table with an unknown letter",
        _TRAIN + "--mesh=data=2 --strategy='Q->data'",
        error="--strategy=Q->data: 'Q' is not the letter of a dimension. Valid: B, C, D, E,"
        " G, H, K, L, M, N, P, R, S, T, U, V, W.",
    ),
    Case(
        "a table with an unknown axis",
        _TRAIN + "--mesh=data=2 --strategy='B->model'",
        error="--strategy=B->model needs axis 'model', which --mesh=data=2 lacks. Valid: data.",
    ),
    Case(
        "a table without an arrow",
        _TRAIN + "--mesh=data=2 --strategy='B=data'",
        error="--strategy=B=data: unknown strategy 'B=data'. Did you mean 'data'? Join "
        "several by '_', or write a table such as 'B,G->data; H->model'.",
    ),
    Case(
        "a letter given twice",
        _TRAIN + "--mesh=data=2 --strategy='B->data; B->data'",
        error="--strategy=B->data; B->data: two rules for letter 'B'",
    ),
    Case(
        "an unknown partitioner",
        _TRAIN + "--mesh=data=2 --partitioner=shardi",
        error="--partitioner=shardi is unknown. Did you mean 'shardy'?",
    ),
    Case(
        "a partitioner that cannot partition dropless experts",
        "gshard-train --experiment=translation.quickstart --logdir=run --mesh=data=2 "
        "--partitioner=shardy --gin_param='task.encoder.moe.router.capacity_factor = 0.0' "
        "--gin_param='task.encoder.moe.router.evaluation_capacity_factor = 0.0' "
        "--gin_param='task.encoder.moe.dispatch = "
        "@lingvo_gshard.wings.dropless.dispatch.DroplessDispatch'",
        error="encoder.layers[1].feed_forward computes in manual regions, and "
        "--partitioner=shardy cannot partition manual regions: TensorFlow has no operations for "
        "Shardy's. Use --partitioner=gspmd",
        changes=("run", "run/*"),
        slow=True,
    ),
    Case(
        "an unknown device order",
        _TRAIN + "--mesh=data=2 --device_order=ring",
        error="--device_order=ring is unknown. Valid: contiguous, topology.",
    ),
    Case(
        "an unknown runtime",
        _TRAIN + "--runtime=gpu",
        error="--runtime=gpu is unknown. Valid: local, spmd, tpu_strategy.",
    ),
    Case(
        "a mesh for one device's runtime",
        _TRAIN + "--runtime=local --mesh=data=2",
        error="--mesh=data=2 needs --runtime=spmd or --runtime=tpu_strategy; the local "
        "runtime has one device",
    ),
    Case(
        "a strategy for one device's runtime",
        _TRAIN + "--runtime=local --strategy=fsdp",
        error="--strategy=fsdp needs --runtime=spmd or --runtime=tpu_strategy; the local "
        "runtime has one device",
    ),
    Case(
        "a partitioner for one device's runtime",
        _TRAIN + "--runtime=local --partitioner=shardy",
        error="--partitioner=shardy needs --runtime=spmd; the local runtime has one device",
    ),
    Case(
        "a strategy without a mesh",
        _TRAIN + "--strategy=fsdp",
        error="--strategy=fsdp needs --runtime=spmd or --runtime=tpu_strategy; the local "
        "runtime has one device",
    ),
    Case(
        "a TPU without its runtime",
        _TRAIN + "--tpu=local",
        error="--tpu=local needs --runtime=tpu_strategy; the local runtime has one device",
    ),
    Case(
        "a TPU runtime without a TPU",
        _TRAIN + "--runtime=tpu_strategy",
        error="--runtime=tpu_strategy needs --tpu, such as --tpu=local on a TPU VM",
    ),
    Case(
        "a TPU that is not here",
        _TRAIN + "--runtime=tpu_strategy --tpu=local",
        error="--tpu=local: TensorFlow ... reaches no TPU: ... The runtime needs TensorFlow's TPU "
        "build on TPU VMs (docs/accelerators.md); --runtime=spmd needs neither",
    ),
    Case(
        "a negative limit of replicated memory",
        _TRAIN + "--mesh=data=2 --max_replicated_mb=-1",
        error="--max_replicated_mb=-1: -1.0 is not a non-negative number",
    ),
    Case(
        "a limit that is no number",
        _TRAIN + "--mesh=data=2 --max_replicated_mb=much",
        error="--max_replicated_mb=much: expected a number, such as 0.5 or 1e12",
    ),
    Case(
        "a limit of replicated memory on one device",
        _TRAIN + "--max_replicated_mb=5",
        error="--max_replicated_mb=5.0 needs --runtime=spmd or --runtime=tpu_strategy; the "
        "local runtime has one device",
    ),
    Case(
        "a cache directory that is a file",
        _TRAIN + "--mesh=data=2 --strategy=data --compilation_cache=file",
        given=(write("file", "x"),),
        error="--compilation_cache=file: File exists",
    ),
    Case(
        "a cache directory under a file",
        _TRAIN + "--compilation_cache=file/cache",
        given=(write("file", "x"),),
        error="--compilation_cache=file/cache needs --runtime=spmd; the local runtime has "
        "one device",
    ),
    Case(
        "an axis of worker without local updates",
        _TRAIN + "--mesh=worker=2,data=2",
        error="--mesh=worker=2,data=2 has an axis worker, which the strategy does not use. "
        "Set step.local_updates.every to the number of steps that workers train "
        "alone, or remove the axis",
    ),
    Case(
        "a mesh of inspection",
        "gshard-inspect --experiment=test.tiny --mesh=dta=8",
        error="--strategy=expert needs axis 'data', which --mesh=dta=8 lacks. "
        "Did you mean --mesh=data=8?",
    ),
    Case(
        "a mesh of a million devices",
        _TRAIN + "--mesh=data=1000000 --strategy=data",
        error="--mesh needs 1,000,000 devices; a process has at most 1,024 virtual ones. "
        "gshard-plan knows what a step takes on machines that are not here",
    ),
    Case(
        "a mesh of 10^30 devices",
        _TRAIN + f"--mesh=data={10**30} --strategy=data",
        error="--mesh=data=1000...: 'data=1000...'; expected axes with their sizes, such as ...",
    ),
    Case(
        "a mesh of 10^17 devices",
        _TRAIN + f"--mesh=data={10**17} --strategy=data",
        error="--mesh needs 100,000,... devices; a process has at most 1,024 virtual ones. ...",
    ),
    Case(
        "an empty strategy",
        _TRAIN + "--mesh=data=2 --strategy=",
        error="--strategy=: unknown strategy ''. ...",
    ),
    Case(
        "a limit that is NaN",
        _TRAIN + "--mesh=data=2 --max_replicated_mb=nan",
        error="--max_replicated_mb=nan; expected a finite number",
    ),
    Case(
        "a table with half an arrow",
        _TRAIN + "--mesh=data=2 --strategy='B->'",
        error="--strategy=B->: 'B->'; expected letters->axes, as in B,G->data",
    ),
    Case(
        "a TPU at an address that does not exist",
        _TRAIN + "--runtime=tpu_strategy --tpu=grpc://nowhere.invalid:8470",
        error="--tpu=grpc://nowhere.invalid:8470: nowhere.invalid:8470 cannot be reached: ...",
    ),
    Case(
        "a TPU at a port where nothing answers",
        _TRAIN + "--runtime=tpu_strategy --tpu=grpc://localhost:1",
        error="--tpu=grpc://localhost:1: localhost:1 cannot be reached: Connection refused",
    ),
    Case(
        "a TPU at a port that does not exist",
        _TRAIN + "--runtime=tpu_strategy --tpu=grpc://localhost:99999",
        error="--tpu=grpc://localhost:99999: expected grpc://address:port, such as "
        "grpc://10.0.0.2:8470",
    ),
    Case(
        "a TPU without a port",
        _TRAIN + "--runtime=tpu_strategy --tpu=grpc://localhost",
        error="--tpu=grpc://localhost: expected grpc://address:port, such as grpc://10.0.0.2:8470",
    ),
    Case(
        "libtpu, which the planner needs, without a TPU",
        _TRAIN + "--mesh=data=2 --strategy=data --steps=1",
        environment={"JAX_PLATFORMS": ""},
        changes=("run", "run/*"),
        prints=("devices     2 CPU devices", "Trained 1 steps"),
        seconds=40,
        slow=True,
    ),
)
