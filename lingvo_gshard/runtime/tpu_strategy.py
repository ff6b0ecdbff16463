"""The tpu_strategy runtime: the local runtime's steps under a tf.distribute strategy.

Under TPUStrategy one replica spans all cores of a TPU, and TensorFlow's own TPU compiler partitions
the step as its annotations say. docs/tpu.md says how to start it and what has been run where.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import jax
import tensorflow as tf

from lingvo_gshard.core.bound_function import WeightsFunction
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.runtime import reports
from lingvo_gshard.runtime.program.step_programs import PARTS, annotated, batch_arrays
from lingvo_gshard.runtime.single_device import SingleDeviceFunction, SingleDeviceRuntime
from lingvo_gshard.sharding import xla
from lingvo_gshard.sharding.partitioning import Partitioning, use_partitioning
from lingvo_gshard.sharding.replication import Replicated, check_replicated
from lingvo_gshard.sharding.strategies import Split
from lingvo_gshard.training.micro_batches import TensorBatch
from lingvo_gshard.training.trainer import Trainer

WAIT_SECONDS = 300.0


class TpuStrategyRuntime(SingleDeviceRuntime):
    """Runs a trainer's functions under a strategy of one replica, which may span many cores.

    The state is in variables made under the strategy's scope. TPUStrategy gives every core a whole
    copy of each; what is computed from them is split over the mesh.
    """

    def __init__(
        self,
        trainer: Trainer,
        strategy: tf.distribute.Strategy,
        partitioning: Partitioning,
        max_replicated_megabytes: float | None = None,
    ):
        """Raises ValueError if the strategy has several replicas, or if every core would hold more
        than `max_replicated_megabytes` whole although the strategy of `partitioning` splits it.
        """
        if strategy.num_replicas_in_sync != 1:
            raise ValueError(
                f"the strategy has {strategy.num_replicas_in_sync} replicas; 1 over all cores "
                "expected, see lingvo_gshard.runtime.tpu_strategy.connect"
            )
        super().__init__(_AnnotatedTrainer(trainer))
        self._strategy = strategy
        self._partitioning = partitioning
        whole = _kept_whole(trainer, partitioning)
        if max_replicated_megabytes is not None:
            check_replicated(whole, max_replicated_megabytes)
        self._notes = reports.not_split(whole)

    @property
    def device_summary(self) -> str:
        """The devices in words, such as `8 TPU cores as data=8`."""
        first = tf.DeviceSpec.from_string(self._strategy.extended.worker_devices[0])
        return (
            f"{self._partitioning.mesh.size} {first.device_type} cores as {self._partitioning.mesh}"
        )

    def pop_messages(self) -> list[str]:
        """Returns what there is to say since the last call: what every core holds whole."""
        notes, self._notes = self._notes, []
        return notes

    def init_state(self) -> None:
        """Draws the initial weights, on the host."""
        with tf.device("/device:CPU:0"):
            state = self._trainer.init_state()
        self.load_state(state)

    def load_state(self, state: NestedMap) -> None:
        """Takes over a state of tensors or NumPy arrays."""
        with self._strategy.scope():
            super().load_state(state)

    def bind_weights(self, function: WeightsFunction) -> SingleDeviceFunction:
        """Returns a function (theta, ids) -> tensor as one of ids alone, on the weights held."""
        return super().bind_weights(
            lambda theta, ids: function(self._trainer.annotated(theta), ids)
        )

    def _compile(self, function: Callable) -> Callable:
        """The strategy runs the XLA computation; annotations in it follow the partitioning."""
        computation = tf.function(function, jit_compile=True, autograph=False)

        def on_replica(argument: tf.Tensor | TensorBatch) -> tf.Tensor:
            with use_partitioning(self._partitioning):
                return self._whole(computation(tf.nest.map_structure(self._rows, argument)))

        def run(argument: tf.Tensor | TensorBatch) -> tf.Tensor:
            result = self._strategy.run(on_replica, args=(argument,))
            return self._strategy.experimental_local_results(result)[0]

        return tf.function(run, autograph=False)

    def _rows(self, tensor: tf.Tensor) -> tf.Tensor:
        """An input, annotated as the rows of a batch are split: TPUStrategy reads it there."""
        spec = tf.TensorSpec(tensor.shape, tensor.dtype)
        (array,) = batch_arrays({"rows": spec}, self._partitioning)
        return self._tile(tensor, array.split)

    def _whole(self, tensor: tf.Tensor) -> tf.Tensor:
        """A result, annotated as whole on every core."""
        return self._tile(tensor, ((),) * tensor.shape.rank)

    def _tile(self, tensor: tf.Tensor, split: Split) -> tf.Tensor:
        mesh = self._partitioning.mesh
        return tensor if mesh.size == 1 else xla.tile(tensor, split, mesh)


class _AnnotatedTrainer:
    """A trainer's functions, with the weights and moments of their states annotated as split."""

    def __init__(self, trainer: Trainer):
        self._trainer = trainer

    @property
    def evaluated_part(self) -> str:
        return self._trainer.evaluated_part

    def evaluated_theta(self, part: NestedMap) -> NestedMap:
        return self._trainer.evaluated_theta(part)

    def init_state(self) -> NestedMap:
        return self._trainer.init_state()

    def train_step(self, state: NestedMap, batch: TensorBatch) -> tuple[NestedMap, NestedMap]:
        new_state, metrics = self._trainer.train_step(annotated(state, self._trainer), batch)
        return annotated(new_state, self._trainer), metrics

    def eval_step(self, theta: NestedMap, batch: TensorBatch) -> NestedMap:
        return self._trainer.eval_step(self.annotated(theta), batch)

    def annotated(self, theta: NestedMap) -> NestedMap:
        """Returns the weights annotated as split."""
        return annotated(NestedMap(theta=theta), self._trainer).theta


def _kept_whole(trainer: Trainer, partitioning: Partitioning) -> list[Replicated]:
    """The weights and moments that the strategy splits, largest first; TPUStrategy splits none."""
    rows = []
    specs = trainer.state_specs()
    for part, kind in PARTS.items():
        for spec in specs[part].flatten() if part in specs else ():
            if any(partitioning.parts(axes) > 1 for axes in partitioning.spec_split(spec, kind)):
                size = math.prod(spec.shape) * tf.as_dtype(spec.dtype).size
                reason = "TPUStrategy gives every core all of it"
                rows.append(Replicated(spec.path, spec.shape, size, reason))
    return sorted(rows, key=lambda row: -row.bytes)


def connect(tpu: str, wait_seconds: float = WAIT_SECONDS) -> tuple[tf.distribute.TPUStrategy, int]:
    """Returns a strategy of one replica over all cores of a TPU, and the number of cores.

    tpu: "local" on a TPU VM, else the name of a Cloud TPU or `grpc://address:port`.
    jax, which writes checkpoints, is told to leave the TPU to TensorFlow.

    Raises ValueError naming --tpu if there is no TPU, or no answer within `wait_seconds`.
    """
    jax.config.update("jax_platforms", "cpu")
    found: list = []

    def initialize() -> None:
        try:
            resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=tpu)
            tf.config.experimental_connect_to_cluster(resolver)
            found.append((resolver, tf.tpu.experimental.initialize_tpu_system(resolver)))
        except Exception as error:  # TensorFlow's own errors and those of several cloud libraries
            found.append(error)

    # TensorFlow waits without end for an address that does not answer.
    thread = threading.Thread(target=initialize, name="connect", daemon=True)
    thread.start()
    thread.join(wait_seconds)
    if not found:
        raise ValueError(f"--tpu={tpu}: no answer within {wait_seconds:.0f} seconds")
    if isinstance(found[0], Exception):
        reason = " ".join(str(found[0]).split())[:300]
        raise ValueError(
            f"--tpu={tpu}: TensorFlow {tf.__version__} reaches no TPU: {reason}. It takes "
            "TensorFlow's TPU build on a TPU VM, see docs/tpu.md; --runtime=spmd needs neither"
        )
    return one_replica(*found[0])


def one_replica(
    resolver: tf.distribute.cluster_resolver.ClusterResolver, topology: tf.tpu.experimental.Topology
) -> tuple[tf.distribute.TPUStrategy, int]:
    """Returns a strategy whose one replica XLA partitions over all cores, and their number."""
    assignment = tf.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=topology.mesh_shape, num_replicas=1
    )
    strategy = tf.distribute.TPUStrategy(
        resolver,
        experimental_device_assignment=assignment,
        experimental_spmd_xla_partitioning=True,
    )
    return strategy, assignment.num_cores_per_replica
