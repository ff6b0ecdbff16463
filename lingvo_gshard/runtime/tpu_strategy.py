"""The runtime of TensorFlow's TPU build: the steps of one device under a tf.distribute strategy.

Under TPUStrategy one replica spans all cores of a TPU, and TensorFlow's TPU compiler partitions the
step as its annotations say. docs/accelerators.md says how to start it and what was run where.
"""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable
from typing import Any

from lingvo_gshard.core import NestedMap, UserError, jax, tf, whole_number
from lingvo_gshard.core.bound_function import BoundFunction, WeightsFunction
from lingvo_gshard.runtime import offloading, partitioning_log
from lingvo_gshard.runtime.program.step_programs import annotated_state, batch_arrays
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.sharding import Partitioning, Split, use_partitioning, xla
from lingvo_gshard.sharding.sharding_tables import Replicated, check_replicated
from lingvo_gshard.training import Measurement, TensorBatch, Trainer

WAIT_SECONDS = 300.0
_CONNECT_SECONDS = 10.0


class TpuStrategyRuntime(SingleDeviceRuntime):
    """Runs a trainer's functions under a strategy of one replica, which may span many cores.

    The state is held in variables of the strategy. TPUStrategy replicates each variable on every
    core; the computation itself is split over the mesh.
    """

    def __init__(
        self,
        trainer: Trainer,
        strategy: tf.distribute.Strategy,
        partitioning: Partitioning,
        max_replicated_megabytes: float | None = None,
    ):
        """Makes a runtime without a state.

        Args:
          strategy: a strategy of one replica, such as `connect` returns.
          partitioning: the mesh over the cores and what is split over its axes.
          max_replicated_megabytes: as in SpmdOptions.

        Raises:
          UserError: the strategy has several replicas, `step.precision` rounds to 8 bits, the
            trainer needs host memory, or too much is replicated.
        """
        if strategy.num_replicas_in_sync != 1:
            raise UserError(
                f"the strategy has {strategy.num_replicas_in_sync} replicas; one over all cores "
                "expected. See lingvo_gshard.runtime.tpu_strategy.connect"
            )
        offloading.refuse(trainer, "tpu_strategy")
        if trainer.precision.rounding:
            raise UserError(
                f"step.precision is {trainer.p.precision!r}, which `runtime=tpu_strategy` does not "
                "compute in 8 bits. Choose `runtime=spmd`, or step.precision = 'bfloat16'"
            )
        annotating: Any = _AnnotatedTrainer(trainer)
        super().__init__(annotating)
        self._annotating = annotating
        self._strategy = strategy
        self._partitioning = partitioning
        replicated = _replicated(trainer, partitioning)
        if max_replicated_megabytes is not None:
            check_replicated(replicated, max_replicated_megabytes)
        self._notes = partitioning_log.describe_unsplit(replicated)

    @property
    def device_summary(self) -> str:
        """The devices in words, such as `8 TPU cores as data=8`."""
        first = tf.DeviceSpec.from_string(self._strategy.extended.worker_devices[0])
        return (
            f"{self._partitioning.mesh.size} {first.device_type} cores as {self._partitioning.mesh}"
        )

    def pop_messages(self) -> list[str]:
        """Returns new messages about tensors that every core holds in full."""
        notes, self._notes = self._notes, []
        return notes

    def init_state(self) -> None:
        """Draws the initial weights on the host."""
        with tf.device("/device:CPU:0"):
            state = self._trainer.init_state()
        self.load_state(state)

    def load_state(self, state: NestedMap) -> None:
        with self._strategy.scope():
            super().load_state(state)

    def bind_weights(self, function: WeightsFunction) -> BoundFunction:
        return super().bind_weights(
            lambda theta, ids: function(self._annotating.layer_weights(theta), ids)
        )

    def _call(self, function: Measurement, batch: TensorBatch) -> TensorBatch:
        theta = self._held.theta.transform(lambda variable: variable.read_value())
        return function(self._annotating.annotated(theta), batch)

    def _compile(self, function: Callable) -> Callable:
        """Returns a function that the strategy runs, with annotations under the partitioning."""
        computation = tf.function(function, jit_compile=True, autograph=False)

        def on_replica(argument: tf.Tensor | TensorBatch) -> tf.Tensor | TensorBatch:
            with use_partitioning(self._partitioning):
                results = computation(tf.nest.map_structure(self._annotate_rows, argument))
                return tf.nest.map_structure(
                    lambda result: self._annotate(result, ((),) * len(result.shape)), results
                )

        def run(argument: tf.Tensor | TensorBatch) -> tf.Tensor | TensorBatch:
            results = self._strategy.run(on_replica, args=(argument,))
            local = self._strategy.experimental_local_results
            return tf.nest.map_structure(lambda result: local(result)[0], results)

        return tf.function(run, autograph=False)

    def _annotate_rows(self, tensor: tf.Tensor) -> tf.Tensor:
        """Annotates an input over the rows of a batch, which TPUStrategy reads."""
        spec = tf.TensorSpec(tensor.shape, tensor.dtype)
        (array,) = batch_arrays({"rows": spec}, self._partitioning)
        return self._annotate(tensor, array.split or ())

    def _annotate(self, tensor: tf.Tensor, split: Split) -> tf.Tensor:
        mesh = self._partitioning.mesh
        return tensor if mesh.size == 1 else xla.tile(tensor, split, mesh)


class _AnnotatedTrainer:
    """A trainer whose steps annotate weights and moments; all else is the plain trainer's."""

    def __init__(self, trainer: Trainer):
        self.plain = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)

    def train_step(self, state: NestedMap, batch: TensorBatch) -> tuple[NestedMap, NestedMap]:
        new_state, metrics = self.plain.train_step(annotated_state(state, self.plain), batch)
        return annotated_state(new_state, self.plain), metrics

    def eval_step(self, theta: NestedMap, batch: TensorBatch) -> NestedMap:
        return self.plain.eval_step(self.annotated(theta), batch)

    def layer_weights(self, theta: NestedMap) -> NestedMap:
        """Returns the weights that layers compute with, with sharding annotations."""
        return self.plain.layer_weights(self.annotated(theta))

    def annotated(self, theta: NestedMap) -> NestedMap:
        """Returns the weights of the state with sharding annotations."""
        return annotated_state(NestedMap(theta=theta), self.plain).theta


def _replicated(trainer: Trainer, partitioning: Partitioning) -> list[Replicated]:
    """Returns the tensors that the strategy splits and TPUStrategy replicates, largest first."""
    rows = []
    specs = trainer.state_specs()
    for part, kind in trainer.sharded_parts.items():
        for spec in specs[part].flatten() if part in specs else ():
            if any(partitioning.parts(axes) > 1 for axes in partitioning.spec_split(spec, kind)):
                size = math.prod(spec.shape) * tf.as_dtype(spec.dtype).size
                reason = "TPUStrategy replicates it on every core"
                rows.append(Replicated(spec.path, spec.shape, size, reason))
    return sorted(rows, key=lambda row: -row.bytes)


def connect(tpu: str, wait_seconds: float = WAIT_SECONDS) -> tuple[tf.distribute.TPUStrategy, int]:
    """Connects to a TPU, and makes jax, which writes checkpoints, leave it to TensorFlow.

    Args:
      tpu: "local" on a TPU VM, else the name of a Cloud TPU or `grpc://address:port`.
      wait_seconds: time to wait for an answer.

    Returns:
      A strategy of one replica over all cores, and the number of cores.

    Raises:
      UserError: names `tpu` if there is no TPU, or no answer in time.
    """
    _check_reachable(tpu)
    jax.config.update("jax_platforms", "cpu")
    found: list = []

    def initialize() -> None:
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=tpu)
            tf.config.experimental_connect_to_cluster(resolver)
            found.append((resolver, tf.tpu.experimental.initialize_tpu_system(resolver)))
        except Exception as error:  # TensorFlow and several cloud libraries raise their own types.
            found.append(error)

    # TensorFlow waits forever for an address that does not answer.
    thread = threading.Thread(target=initialize, name="connect", daemon=True)
    thread.start()
    thread.join(wait_seconds)
    if not found:
        raise UserError(f"`tpu={tpu}`: no answer within {wait_seconds:.0f} seconds")
    if isinstance(found[0], Exception):
        reason = " ".join(str(found[0]).split())[:300]
        raise UserError(
            f"`tpu={tpu}`: TensorFlow {tf.__version__} reaches no TPU: {reason}. The runtime needs "
            "TensorFlow's TPU build on TPU VMs (docs/accelerators.md); `runtime=spmd` needs neither"
        )
    return one_replica(*found[0])


def _check_reachable(tpu: str) -> None:
    """Raises UserError if nothing answers at `grpc://address:port`. TensorFlow would just wait."""
    scheme, _, address = tpu.rpartition("://")
    if scheme != "grpc":
        return
    host, _, port = address.rpartition(":")
    if not host or not 0 < (whole_number(port) or 0) < 65536:
        raise UserError(f"`tpu={tpu}`: expected grpc://address:port, such as grpc://10.0.0.2:8470")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(f"`tpu={tpu}`: {host}:{port} cannot be reached: {reason}") from None


def one_replica(
    resolver: tf.distribute.cluster_resolver.ClusterResolver, topology: tf.tpu.experimental.Topology
) -> tuple[tf.distribute.TPUStrategy, int]:
    """Returns a strategy of one replica that spans all cores, and the number of cores."""
    assignment = tf.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=topology.mesh_shape, num_replicas=1
    )
    strategy = tf.distribute.TPUStrategy(
        resolver, experimental_device_assignment=assignment, experimental_spmd_xla_partitioning=True
    )
    return strategy, assignment.num_cores_per_replica
