"""fit and evaluate: Keras's own loops, with steps that run over a mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lingvo_gshard.core import UserError
from lingvo_gshard.core.lazy import Device, jax, keras
from lingvo_gshard.keras import model_state
from lingvo_gshard.keras.checkpoints import Checkpoints, Saver
from lingvo_gshard.keras.layouts import Layouts, LayoutTable, check_keras
from lingvo_gshard.keras.mesh_steps import MeshSteps
from lingvo_gshard.runtime import devices_for
from lingvo_gshard.sharding import Mesh

# Methods of callbacks that run between the steps of an epoch.
_BATCH_METHODS = (
    *("on_batch_begin", "on_batch_end"),
    *("on_train_batch_begin", "on_train_batch_end"),
)
# Keras's callbacks whose batch methods read logs only, unless they save by batches.
_READS_LOGS = (
    *("ProgbarLogger", "History", "CSVLogger", "TerminateOnNaN", "TensorBoard", "RemoteMonitor"),
    *("EarlyStopping", "ReduceLROnPlateau", "LearningRateScheduler", "ModelCheckpoint"),
    *("BackupAndRestore", "SwapEMAWeights"),
)


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    mesh: Mesh | str | Any | None = None,
    layout: LayoutTable | None = None,
    strategy: str | None = None,
    batch_axes: Sequence[str] | str | None = None,
    checkpoints: Checkpoints | None = None,
    partitioner: str = "gspmd",
    compile_options: Sequence[str] = (),
    devices: Sequence[Device] | None = None,
    callbacks: Sequence[Any] | None = None,
    **arguments: Any,
) -> Any:
    """Trains a compiled Keras model over a mesh, as `Model.fit` does on one device.

    The model's own `train_step` is compiled. The model's variables get the values of the devices
    at the end of every epoch and of the training.

    Args:
      model: functional, sequential or subclassed; compiled.
      x: a dataset or arrays, as for `Model.fit`. In a cluster every process gives the same.
      y: targets, as for `Model.fit`.
      mesh: axes and sizes, such as "data=4,model=2", or a `keras.distribution.DeviceMesh`. None:
        the mesh of the LayoutMap. Virtual CPU devices stand in for missing ones.
      layout: a `keras.distribution.LayoutMap`, or a table from patterns of paths of variables to
        letters ("MH") or to an axis or None for each dimension. Other variables are whole on each
        device, unless `strategy` splits any weight.
      strategy: maps the letters of `layout` and of annotations to axes. By default letters split
        nothing.
      batch_axes: axes that split the rows of batches. By default the strategy's axes of the letter
        B, or without a strategy the first axis of the mesh.
      checkpoints: where to save, and to resume from. None: nowhere.
      partitioner: "gspmd" or "shardy".
      compile_options: options of XLA's compiler, as for `lingvo_gshard.partition`.
      devices: as many as the mesh has places; by default those that jax finds.
      callbacks: as for `Model.fit`.
      **arguments: further arguments of `Model.fit`, such as `epochs` and `validation_data`.

    Returns:
      The `History` that `Model.fit` returns. It is empty if `checkpoints` has all epochs already;
      the model then has the weights and the optimizer state of the last checkpoint.

    Raises:
      UserError: the model is not compiled, an option is wrong, or XLA cannot compile the model.
    """
    layouts = layouts_for(model, mesh, layout, strategy, batch_axes)
    devices = _devices_of(layouts) if devices is None else devices
    steps = MeshSteps(model, layouts, devices, partitioner, compile_options)
    given = _as_list(callbacks)
    steps.sees_batches = any(map(_sees_batches, given))
    used = [_synchronizer(steps), *given]
    with steps.in_place():
        if checkpoints is None:
            return model.fit(x, y, callbacks=used, **arguments)
        return _fit_on(Saver(checkpoints, steps), steps, model, x, y, used, arguments)


def evaluate(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    mesh: Mesh | str | Any | None = None,
    layout: LayoutTable | None = None,
    strategy: str | None = None,
    batch_axes: Sequence[str] | str | None = None,
    partitioner: str = "gspmd",
    compile_options: Sequence[str] = (),
    devices: Sequence[Device] | None = None,
    **arguments: Any,
) -> Any:
    """Evaluates a compiled Keras model over a mesh. Returns what `Model.evaluate` returns.

    Arguments and errors are as for `fit`, and `Model.evaluate` explains further ones.
    """
    layouts = layouts_for(model, mesh, layout, strategy, batch_axes)
    devices = _devices_of(layouts) if devices is None else devices
    steps = MeshSteps(model, layouts, devices, partitioner, compile_options)
    with steps.in_place():
        return model.evaluate(x, y, **arguments)


def layouts_for(
    model: Any,
    mesh: Mesh | str | Any | None,
    layout: LayoutTable | None,
    strategy: str | None,
    batch_axes: Sequence[str] | str | None,
) -> Layouts:
    """Returns the layouts of a compiled model under the options of `fit`."""
    check_keras()
    model_state.check_model(model)
    own = model_state.own_layouts(model)
    return Layouts.make(mesh, layout, strategy, batch_axes, own)


def _devices_of(layouts: Layouts) -> Sequence[Device]:
    """Returns devices for the mesh, of all processes of a cluster."""
    # jax makes its devices when it is first asked for the number of processes.
    processes = jax.process_count() if jax.distributed.is_initialized() else 1
    return devices_for(layouts.partitioning.mesh.size, processes)


def _fit_on(
    saver: Saver,
    steps: MeshSteps,
    model: Any,
    x: Any,
    y: Any,
    callbacks: Sequence[Any],
    arguments: Mapping[str, Any],
) -> Any:
    """Trains from the newest checkpoint, and restores it also if no epoch is left."""
    resumed, options = saver.resume(), dict(arguments)
    if resumed.step:
        options["initial_epoch"] = resumed.epoch
    # The learning rate is what callbacks read before the first step.
    saver.begin(model.optimizer)
    if resumed.step and resumed.epoch >= options.get("epochs", 1):
        # No step will restore the weights, which `fit` may replace by their averages at its end.
        one_epoch = {**options, "initial_epoch": 0, "epochs": 1, "verbose": 0}
        steps.prepare(lambda: model.fit(x, y, **one_epoch))
    history = model.fit(x, y, callbacks=[*callbacks, _saving(saver)], **options)
    saver.check_restored()
    return history


def _as_list(callbacks: Any) -> list[Any]:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise UserError("`callbacks` is a CallbackList; give the list of its callbacks")
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]


def _sees_batches(callback: Any) -> bool:
    """Returns whether a callback may read or set weights between the steps of an epoch."""
    cls = type(callback)
    if cls.__module__.startswith("keras.") and cls.__name__ in _READS_LOGS:
        return isinstance(getattr(callback, "save_freq", "epoch"), int)
    base = keras.callbacks.Callback
    own = (getattr(cls, name) is not getattr(base, name) for name in _BATCH_METHODS)
    # A LambdaCallback has its functions as attributes.
    return any(own) or any(name in vars(callback) for name in _BATCH_METHODS)


def _synchronizer(steps: MeshSteps) -> Any:
    """Returns the callback that gives the others the variables of the devices; it comes first."""
    return keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda *_: steps.begin_epoch(),
        on_train_batch_end=lambda batch, logs: steps.pull() if steps.sees_batches else None,
        on_epoch_end=lambda *_: steps.pull(),
        on_train_end=lambda *_: steps.pull(),
    )


def _saving(saver: Saver) -> Any:
    """Returns the callback that saves checkpoints; it comes last, after others have set weights."""
    return keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, _: saver.begin_epoch(epoch),
        on_train_batch_end=lambda batch, logs: saver.end_batch(batch + 1),
        on_epoch_end=lambda *_: saver.end_epoch(),
        on_train_end=lambda *_: saver.close(),
    )
