# tests: runtime/offloading.py, core/memory_kinds.py, wings/optimizers/offload.py
"""Trains with arrays in host memory: the same values, placements in the program, refusals."""

import json

import numpy as np
import pytest
import rich.console
import tensorflow as tf

import lingvo_gshard as gshard
from lingvo_gshard.core.errors import UserError
from lingvo_gshard.core.memory_kinds import HOST
from lingvo_gshard.layers.stacks.execution import Sequential
from lingvo_gshard.runtime.devices import devices_for
from lingvo_gshard.runtime.program.executable import Executable
from lingvo_gshard.runtime.program.program import Program
from lingvo_gshard.runtime.program.step_programs import train_program
from lingvo_gshard.runtime.single_device import SingleDeviceRuntime
from lingvo_gshard.runtime.spmd import SpmdRuntime
from lingvo_gshard.runtime.step_compiler import batch_specs
from lingvo_gshard.runtime.tpu_strategy import TpuStrategyRuntime
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.local_updates.runtime import LocalUpdatesRuntime
from lingvo_gshard.wings.optimizers.local_updates import LocalUpdates
from lingvo_gshard.wings.pipeline.pipeline import Pipeline
from lingvo_gshard.wings.repeat.loop import Repeat
from tests import tiny
from tests.runtime import tiny_translation, trainings

QUIET = rich.console.Console(quiet=True)
MOMENTS = ("hidden.w/first_moment", "hidden.w/second_moment")


def tiny_trainer(**values):
    params = tiny.experiment_params()
    params.step.set(**values)
    return params.step.instantiate(params.task)


def stacked_trainer(execution, policy, **values):
    # Without experts, which would take most of the time to compile.
    stack = {"execution": execution.params().set(rematerialize=policy), "moe_every": 0}
    return tiny_translation.trainer(stack_values=stack, **values)


def runtime_of(trainer, mesh="data=2", strategy="fsdp"):
    partitioning = Partitioning.make(mesh, strategy)
    return SpmdRuntime(trainer, partitioning, devices_for(partitioning.mesh.size))


def program_of(trainer, mesh="data=2", strategy="fsdp"):
    specs = batch_specs(tiny_translation.batch(0))
    return train_program(trainer, Partitioning.make(mesh, strategy), "gspmd", specs)[0]


def trained(trainer, batch, steps=3):
    runtime = runtime_of(trainer)
    runtime.init_state()
    return runtime, [metrics["loss"] for metrics in trainings.train(runtime, steps, batch)]


def test_moments_live_in_host_memory_and_train_as_on_the_device():
    def batch(index):
        return tiny.make_batch(1, index)

    (plain, expected), (hosted, found) = (
        trained(tiny_trainer(offload_moments=is_offloaded), batch) for is_offloaded in (False, True)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    before = dict(plain.state().flatten_items())
    kinds = {}
    for path, value in hosted.state().flatten_items():
        np.testing.assert_allclose(value, before[path], rtol=1e-5, atol=1e-7, err_msg=path)
        kinds[path] = value.sharding.memory_kind
    hosted_paths = {path for path, kind in kinds.items() if kind == HOST}
    assert {f"moments.{path.replace('/', '.')}" for path in MOMENTS} <= hosted_paths
    assert all(path.startswith("moments.") and ".b." not in path for path in hosted_paths)
    (message,) = [each for each in hosted.pop_messages() if "offload" in each]
    assert message.startswith("step.offload_moments = True is simulated: the memory of a CPU")


def test_state_moves_between_runtimes_with_and_without_host_memory():
    hosted, plain = (runtime_of(tiny_trainer(offload_moments=x)) for x in (True, False))
    hosted.init_state()
    hosted.train_step(tiny.make_batch(1, 0)).read()
    kept = hosted.state().transform(lambda x: np.array(x))
    plain.load_state(hosted.state())
    hosted.load_state(plain.state())
    for runtime in (plain, hosted):
        for mine, theirs in zip(runtime.state().flatten(), kept.flatten(), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    hosted.train_step(tiny.make_batch(1, 1)).read()


@pytest.mark.slow
def test_a_run_resumes_to_the_bit(tmp_path):
    def train(name, steps):
        params = tiny.experiment_params()
        params.step.offload_moments = True
        where = {"runtime": "spmd", "mesh": "data=2", "strategy": "fsdp"}
        gshard.train(params, tmp_path / name, steps=steps, console=QUIET, **where)
        lines = (tmp_path / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["loss"] for line in lines]

    train("resumed", 3)
    assert train("resumed", 5) == train("whole", 5)


def test_a_saved_program_keeps_its_arrays_in_host_memory(tmp_path):
    batch = tiny.make_batch(1, 0)
    partitioning = Partitioning.make("data=2", "fsdp")
    trainer = tiny_trainer(offload_moments=True)
    program, _ = train_program(trainer, partitioning, "gspmd", batch_specs(batch))
    program.save(tmp_path / "step")
    loaded = Program.load(tmp_path / "step")
    assert loaded == program and loaded.digest == program.digest
    assert sum(bool(array.is_on_host) for array in loaded.inputs) == 4
    kinds = [each.memory_kind for each in Executable(loaded, devices_for(2)).output_shardings]
    assert [kind == HOST for kind in kinds] == [bool(out.is_on_host) for out in loaded.outputs]


@pytest.mark.slow
@pytest.mark.parametrize("execution", [Repeat, Sequential])
def test_saved_activations_are_marked(execution):
    plain, hosted = (stacked_trainer(execution, x) for x in ("full", "full_offloaded"))
    text = program_of(hosted).exported().mlir_module()
    saved, read = (text.count(f'_xla_buffer_placement = "{kind}"') for kind in (HOST, "device"))
    assert saved == read > 0
    assert "_xla_buffer_placement" not in program_of(plain).exported().mlir_module()


@pytest.mark.slow
@pytest.mark.parametrize("execution", [Repeat, Sequential])
def test_saved_activations_train_as_on_the_device(execution):
    (_, expected), (_, found) = (
        trained(stacked_trainer(execution, policy), tiny_translation.batch, 2)
        for policy in ("full", "full_offloaded")
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_other_runtimes_refuse_host_memory():
    moments = tiny_trainer(offload_moments=True)
    with pytest.raises(UserError, match=r"step\.offload_moments = True needs `runtime=spmd`"):
        SingleDeviceRuntime(moments)
    layers = stacked_trainer(Repeat, "products_offloaded")
    path = r"^encoder\.layers\.rematerialize = 'products_offloaded' needs `runtime=spmd`"
    with pytest.raises(UserError, match=path):
        SingleDeviceRuntime(layers)
    partitioning = Partitioning.make("data=1", "data")
    with pytest.raises(UserError, match="with `runtime=tpu_strategy` TensorFlow compiles"):
        TpuStrategyRuntime(moments, tf.distribute.get_strategy(), partitioning)
    workers = Partitioning.make("worker=2", "replicated")
    each = tiny_trainer(offload_moments=True, local_updates=LocalUpdates.params().set(every=2))
    with pytest.raises(UserError, match=r"offload_moments .* step\.local_updates\.every=2"):
        LocalUpdatesRuntime(each, workers, devices_for(2))


def test_a_pipeline_refuses_an_offloaded_policy():
    params = Pipeline.params().set(stages=2, rematerialize="full_offloaded")
    with pytest.raises(UserError, match=r"layers\.execution\.rematerialize is 'full_offloaded'"):
        Pipeline.for_layers(params, [tiny.TinyDense.params()] * 2, 1, "layers.execution")
