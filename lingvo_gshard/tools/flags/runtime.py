"""The flags that say what runs the steps, and the runtime they ask for."""

from __future__ import annotations

from absl import flags

from lingvo_gshard.core import user_cache
from lingvo_gshard.core.config import names
from lingvo_gshard.core.config.params import Params
from lingvo_gshard.runtime.cluster import cluster
from lingvo_gshard.runtime.cluster.cluster import Cluster
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.sharding import strategies
from lingvo_gshard.sharding.mesh import DEVICE_ORDERS, Mesh
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.training import experiments
from lingvo_gshard.training.local_updates import AXIS
from lingvo_gshard.training.runtime_protocol import Runtime
from lingvo_gshard.training.trainer import Trainer

RUNTIMES = ("local", "spmd", "tpu_strategy")
PARTITIONERS = ("gspmd", "shardy")

# The flags that not every runtime reads, and what those have that do not read one.
_READ_BY = {
    "mesh": ("spmd", "tpu_strategy"),
    "strategy": ("spmd", "tpu_strategy"),
    "max_replicated_mb": ("spmd", "tpu_strategy"),
    "compilation_cache": ("spmd",),
    "device_order": ("spmd",),
    "partitioner": ("spmd",),
    "coordinator": ("spmd",),
    "num_processes": ("spmd",),
    "process_id": ("spmd",),
    "tpu": ("tpu_strategy",),
}
# What all processes of a cluster must be given alike, beside the Params.
_ALIKE = ("mesh", "strategy", "device_order", "partitioner", "logdir")
_HAS = {
    "local": "the local runtime has one device",
    "spmd": "the spmd runtime has jax's devices",
    "tpu_strategy": "under tpu_strategy TensorFlow orders the cores and partitions",
}


def define_runtime_flags(values: flags.FlagValues, in_cluster: bool = True) -> None:
    """Adds the flags that say what runs the steps; `in_cluster`: also in several processes."""
    flags.DEFINE_string(
        "runtime",
        None,
        "What runs the steps: local (one device), spmd (all devices of --mesh, through XLA's "
        "SPMD partitioner), or tpu_strategy (all cores of --tpu, through TensorFlow's TPU build). "
        "spmd if --mesh, --coordinator or sharding.mesh is given, else local.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "tpu",
        None,
        "The TPU of --runtime=tpu_strategy: local on a TPU VM, else the name of a Cloud TPU or "
        "grpc://address:port.",
        flag_values=values,
    )
    define_partitioning_flags(values)
    if in_cluster:
        cluster.define_flags(values)


def define_partitioning_flags(values: flags.FlagValues) -> None:
    """Adds the flags that say what is split, over which devices, and how that is compiled."""
    define_splitting_flags(values)
    flags.DEFINE_string(
        "compilation_cache",
        None,
        "Directory of compiled programs, for later runs; '' keeps none. Default: "
        "lingvo_gshard/xla in $XDG_CACHE_HOME or ~/.cache.",
        flag_values=values,
    )
    flags.DEFINE_float(
        "max_replicated_mb",
        None,
        "Refuses to run if every device would hold more than so many MiB whole although the "
        "strategy splits them.",
        0.0,
        flag_values=values,
    )


def define_splitting_flags(values: flags.FlagValues) -> None:
    """Adds the flags that say what is split, and over which devices."""
    flags.DEFINE_string(
        "mesh",
        None,
        "Axes over the devices and their sizes, as data=4,model=2. Default: sharding.mesh, else "
        "data=N for all N devices. CPU devices are made virtually if there are too few.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "strategy",
        None,
        f"What is split over which axis: one of {', '.join(strategies.base_names())}, several "
        "joined by '_', or a table such as 'B,G->data; H->model'. Default: sharding.strategy, "
        f"else {experiments.DEFAULT_STRATEGY}.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "device_order",
        "contiguous",
        "How the mesh is laid over the devices: contiguous, or topology for rings of a TPU.",
        flag_values=values,
    )
    flags.DEFINE_string("partitioner", "gspmd", "gspmd or shardy.", flag_values=values)


class Launch:
    """What the flags ask for, checked; under spmd the devices, under tpu_strategy the TPU.

    To be made before anything else starts jax, and used as a context manager around all that the
    processes of a cluster do together. Raises ValueError naming the flag that does not fit.
    """

    def __init__(self, values: flags.FlagValues, params: Params):
        self.kind = _kind(values, params)
        self._values = values
        self.cluster = Cluster()
        self.partitioning: Partitioning | None = None
        if self.kind == "spmd":
            self._start_spmd(values, params)
        elif self.kind == "tpu_strategy":
            self._start_tpu_strategy(values, params)

    def __enter__(self) -> Launch:
        self.cluster.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.cluster.__exit__(*error)

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that prints and writes what all share."""
        return self.cluster.is_main

    def runtime(self, trainer: Trainer) -> Runtime:
        """Returns the runtime for a trainer."""
        if self.partitioning is None:
            return SingleDeviceRuntime(trainer)
        experiments.check_overrides(self.partitioning, trainer)
        if self.kind == "tpu_strategy":
            from lingvo_gshard.runtime.tpu_strategy import TpuStrategyRuntime

            most = self._values.max_replicated_mb
            return TpuStrategyRuntime(trainer, self._tpu_strategy, self.partitioning, most)
        from lingvo_gshard.runtime.local_updates.runtime import LocalUpdatesRuntime
        from lingvo_gshard.runtime.spmd import SpmdRuntime

        has_workers = trainer.p.local_updates.every and AXIS in self.partitioning.mesh.names
        return (LocalUpdatesRuntime if has_workers else SpmdRuntime)(
            trainer,
            self.partitioning,
            self._devices,
            self._values.partitioner,
            self._values.max_replicated_mb,
        )

    def check_workers(self, params: Params) -> None:
        """Raises ValueError where trainer.local_updates, the mesh and the rows do not fit."""
        from lingvo_gshard.runtime.local_updates import workers

        rows = params.input.cls.rows_per_batch(params.input)
        workers.check(params.trainer, self.partitioning, rows)

    def _start_spmd(self, values: flags.FlagValues, params: Params) -> None:
        from lingvo_gshard.runtime.devices import devices_for, let_jax_choose_devices
        from lingvo_gshard.runtime.program import compilation_cache

        let_jax_choose_devices()
        mesh = experiments.requested_mesh(params, values.mesh, values.device_order)
        if values.compilation_cache != "":
            compilation_cache.keep_in(user_cache.directory("xla", values.compilation_cache))
        facts = {f"--{name}": values[name].value or "its default" for name in _ALIKE}
        if "coordinator" in values:
            self.cluster = Cluster.from_flags(values, {**facts, "Params": params.to_text()})
        self._devices = devices_for(mesh.size if mesh else None, self.cluster.size)
        mesh = mesh or Mesh((("data", len(self._devices)),), values.device_order)
        self.partitioning = experiments.requested_partitioning(params, mesh, values.strategy)

    def _start_tpu_strategy(self, values: flags.FlagValues, params: Params) -> None:
        from lingvo_gshard.runtime.tpu_strategy import connect

        mesh = experiments.requested_mesh(params, values.mesh, values.device_order)
        self._tpu_strategy, cores = connect(values.tpu)
        mesh = mesh or Mesh((("data", cores),))
        mesh.check_devices(cores)
        self.partitioning = experiments.requested_partitioning(params, mesh, values.strategy)


def check_choices(values: flags.FlagValues) -> None:
    """Raises ValueError with the nearest name if --partitioner or --device_order is unknown."""
    for flag, valid in (("partitioner", PARTITIONERS), ("device_order", DEVICE_ORDERS)):
        if values[flag].value not in valid:
            hint = names.nearest(values[flag].value, valid)
            raise ValueError(f"--{flag}={values[flag].value} is unknown. {hint}")


def _kind(values: flags.FlagValues, params: Params) -> str:
    """The runtime asked for, checked against the flags that only another one reads."""
    several = any(_is_given(values, name) for name in ("mesh", "coordinator"))
    kind = values.runtime or ("spmd" if several or params.sharding.mesh else "local")
    if kind not in RUNTIMES:
        raise ValueError(f"--runtime={kind} is unknown. {names.nearest(kind, RUNTIMES)}")
    check_choices(values)
    for flag, runtimes in _READ_BY.items():
        if _is_given(values, flag) and kind not in runtimes:
            needed = " or ".join(f"--runtime={name}" for name in runtimes)
            raise ValueError(f"--{flag}={values[flag].value} needs {needed}; {_HAS[kind]}")
    if kind == "tpu_strategy" and not values.tpu:
        raise ValueError("--runtime=tpu_strategy needs --tpu, such as --tpu=local on a TPU VM")
    return kind


def _is_given(values: flags.FlagValues, name: str) -> bool:
    return name in values and bool(values[name].present)
