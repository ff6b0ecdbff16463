"""Backend: the devices and processes that run an experiment, as the options ask for."""

from __future__ import annotations

import functools
import os
from typing import Any

from lingvo_gshard.api.options import RUNTIMES, RuntimeOptions
from lingvo_gshard.core import Params, UserError, cached, jax
from lingvo_gshard.runtime import SingleDeviceRuntime, devices
from lingvo_gshard.sharding import Partitioning, strategies
from lingvo_gshard.training import Trainer, experiments
from lingvo_gshard.wings.cluster.cluster import Cluster
from lingvo_gshard.wings.optimizers.local_updates import AXIS
from lingvo_gshard.wings.services.runtime import DeviceRuntime

# The runtimes that read an option; options that are not here suit every runtime.
_ONLY_SPMD = (
    *("compilation_cache", "device_order", "partitioner", "compile_options", "plan"),
    *("coordinator", "num_processes", "process_id"),
)
_READ_BY = {
    **dict.fromkeys(("mesh", "strategy", "max_replicated_mb"), ("spmd", "tpu_strategy")),
    **dict.fromkeys(_ONLY_SPMD, ("spmd",)),
    "tpu": ("tpu_strategy",),
}
_WHY_NOT = {
    "local": "the local runtime has one device",
    "spmd": "the spmd runtime has jax's devices",
    "tpu_strategy": "under tpu_strategy TensorFlow orders the cores and partitions",
}
# Besides the Params, all processes of a cluster must have these options in common.
_SHARED = ("mesh", "strategy", "device_order", "partitioner", "compile_options")


class Backend:
    """The devices and processes that run an experiment.

    Make it before anything else starts jax. Used as a context manager around all that the processes
    of a cluster do together.

    Attributes:
      kind: the runtime, one of `RUNTIMES`.
      cluster: the processes; one alone is a cluster of one.
      partitioning: mesh and strategy; None under the local runtime.
    """

    def __init__(
        self, options: RuntimeOptions, params: Params, logdir: str = "", decodes: bool = False
    ):
        """Connects processes and devices.

        Args:
          options: what to run on.
          params: the experiment, whose `sharding` fills in for options that are None.
          logdir: the run's directory, which all processes must share.
          decodes: whether the model may decode, which jax does under every runtime.

        Raises:
          UserError: options do not fit the runtime, the devices or each other.
        """
        _check_names(options, params)
        self.kind = _runtime_kind(options, params, decodes)
        self.cluster = Cluster()
        self.partitioning: Partitioning | None = None
        self._options = options
        self._partitioner = experiments.requested_partitioner(params, options.partitioner)
        self._compile_options = experiments.requested_compile_options(
            params, options.compile_options
        )
        if self.kind == "spmd":
            devices.let_jax_choose_devices()
            self._start_spmd(params, logdir)
        else:
            devices.keep_jax_on_cpu()
        if self.kind == "tpu_strategy":
            self._start_tpu_strategy(params)

    def __enter__(self) -> Backend:
        self.cluster.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.cluster.__exit__(*error)

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes for all."""
        return self.cluster.is_main

    @property
    def partitioner(self) -> str:
        """XLA's partitioner for programs of a mesh."""
        return self._partitioner

    @functools.cached_property
    def devices(self) -> list[Any]:
        """The jax devices that decode: the devices of the mesh, or jax's first device."""
        return self._devices if self.kind == "spmd" else jax.devices()[:1]

    def make_runtime(
        self, trainer: Trainer, kept: tuple[os.PathLike, str] | None = None
    ) -> DeviceRuntime:
        """Returns a trainer's runtime on these devices.

        Args:
          kept: the folder of kept programs, and the Params that they depend on.

        Raises:
          UserError: `sharding.overrides` names no layer or weight of the task, or the runtime does
            not keep programs.
        """
        has_workers = trainer.p.local_updates.every and AXIS in self._axes
        if kept and (self.kind != "spmd" or has_workers):
            given = "`step.local_updates`" if has_workers else f"`runtime={self.kind}`"
            raise UserError(f"run.keep_programs=True needs `runtime=spmd`, not {given}")
        if self.partitioning is None:
            return SingleDeviceRuntime(trainer)
        experiments.check_overrides(self.partitioning, trainer)
        limit = self._options.max_replicated_mb
        if self.kind == "tpu_strategy":
            from lingvo_gshard.runtime import TpuStrategyRuntime

            return TpuStrategyRuntime(trainer, self._tpu_strategy, self.partitioning, limit)
        from lingvo_gshard.runtime import SpmdOptions, SpmdRuntime
        from lingvo_gshard.wings.local_updates.runtime import LocalUpdatesRuntime

        make = LocalUpdatesRuntime if has_workers else SpmdRuntime
        options = SpmdOptions(self._partitioner, limit, self._compile_options)
        if kept:
            from lingvo_gshard.wings.saved_programs.kept import KeepingRuntime

            make = functools.partial(KeepingRuntime, kept=kept)
        return make(trainer, self.partitioning, self._devices, options)

    @property
    def _axes(self) -> tuple[str, ...]:
        return self.partitioning.mesh.names if self.partitioning else ()

    def check_workers(self, params: Params) -> None:
        """Raises ValueError if step.local_updates, the mesh and the batch do not fit."""
        has_workers = AXIS in self._axes
        if not has_workers and not params.step.local_updates.every:
            return
        from lingvo_gshard.wings.local_updates import workers

        rows = params.input.cls.rows_per_batch(params.input)
        workers.check(params.step, self.partitioning, rows)

    def _start_spmd(self, params: Params, logdir: str) -> None:
        from lingvo_gshard.runtime import keep_in

        options = self._options
        mesh = experiments.requested_mesh(params, options.mesh, options.device_order)
        if options.compilation_cache != "":
            keep_in(cached.directory("xla", options.compilation_cache))
        if options.cluster is not None:
            shared = {name: getattr(options, name) for name in _SHARED} | {"logdir": logdir}
            facts = {name: value or "its default" for name, value in shared.items()}
            self.cluster = Cluster.join(options.cluster, {**facts, "Params": params.to_text()})
        self._devices = devices.devices_for(
            mesh.size if mesh else None,
            self.cluster.size,
            "`mesh`" if options.plan is None else f"`plan={options.plan}`",
        )
        if options.plan is not None:
            options.plan.check_devices(self._devices)
        mesh = mesh or experiments.one_axis(params, len(self._devices), options.device_order)
        self.partitioning = experiments.requested_partitioning(params, mesh, options.strategy)

    def _start_tpu_strategy(self, params: Params) -> None:
        from lingvo_gshard.runtime import tpu_strategy

        options = self._options
        assert options.tpu is not None  # _runtime_kind refuses tpu_strategy without it.
        mesh = experiments.requested_mesh(params, options.mesh, options.device_order)
        self._tpu_strategy, cores = tpu_strategy.connect(options.tpu)
        mesh = mesh or experiments.one_axis(params, cores)
        mesh.check_devices(cores)
        self.partitioning = experiments.requested_partitioning(params, mesh, options.strategy)


def _check_names(options: RuntimeOptions, params: Params) -> None:
    """Raises ValueError if mesh or strategy is wrong, before jax and TensorFlow are imported.

    Without a mesh, only names of strategies can be wrong.
    """
    mesh = experiments.requested_mesh(params, options.mesh, options.device_order)
    bases = [] if "->" in (options.strategy or "") else (options.strategy or "data").split("_")
    if mesh or {base.strip() for base in bases} - set(strategies.base_names()):
        mesh = mesh or experiments.one_axis(params, 1)
        experiments.requested_partitioning(params, mesh, options.strategy)


def _runtime_kind(options: RuntimeOptions, params: Params, decodes: bool) -> str:
    """Returns the runtime to use; ValueError if an option is only for other runtimes."""
    given = options.given()
    has_mesh = "mesh" in given or "coordinator" in given or params.sharding.mesh
    kind = options.runtime or ("spmd" if has_mesh else "local")
    if decodes:
        # Decoding programs are cached under every runtime.
        given.pop("compilation_cache", None)
    if options.plan is not None and options.plan.devices == 1:
        # Every runtime can run the plan of one device.
        del given["plan"]
    for name, value in given.items():
        if kind not in _READ_BY.get(name, RUNTIMES):
            needed = " or ".join(f"`runtime={runtime}`" for runtime in _READ_BY[name])
            raise UserError(f"`{name}={value}` needs {needed}; {_WHY_NOT[kind]}")
    if kind == "tpu_strategy" and not options.tpu:
        raise UserError("`runtime=tpu_strategy` needs `tpu`, such as `tpu=local` on a TPU VM")
    return kind
