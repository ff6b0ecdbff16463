"""Libraries that are slow to import, imported when they are first used.

TensorFlow takes seconds to import, and jax one. Names and help of experiments, hyperparameters and
vocabularies need neither, and saved programs no TensorFlow, but they share files with what does.
The package therefore imports what takes a tenth of a second or more from this file:

    from lingvo_gshard.core.lazy import tf

While it is imported, a file of the package must not read an attribute of these modules. Type
aliases are written as strings, and `from __future__ import annotations` keeps annotations
unevaluated.

This is also the only file that names TensorFlow's private modules.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

# Packages that were used; package -> the context manager to import it in.
_used: set[str] = set()
_contexts: dict[str, Callable[[], contextlib.AbstractContextManager]] = {}
_lock = threading.RLock()


class LazyModule(types.ModuleType):
    """Stands for a module, and imports it when one of its attributes is first read."""

    def __getattr__(self, name: str) -> Any:
        # Tracing a step reads attributes a hundred thousand times.
        module = self.__dict__.get("_module")
        if module is None:
            _import_package(self.__name__.partition(".")[0])
            module = self.__dict__["_module"] = importlib.import_module(self.__name__)
        return getattr(module, name)


class PrivateModule(LazyModule):
    """Stands for a module that TensorFlow does not promise to keep."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"TensorFlow {tf.__version__} no longer has its private {self.__name__}.{name}. "
                "lingvo_gshard/core/lazy.py is the one file that names it."
            ) from error


def surround_import(package: str, context: Callable[[], contextlib.AbstractContextManager]) -> None:
    """Sets a context manager inside which a package is imported when it is first used.

    It does not matter who imports the package: this file, another library, or a module of the user.
    The command lines use it to hide start-up messages.

    Args:
      package: the package, such as "tensorflow".
    """
    _contexts[package] = context
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def _import_package(package: str) -> None:
    if package in _used:
        return
    with _lock:
        if package not in _used:
            # The context may use the package.
            _used.add(package)
            with _contexts.get(package, contextlib.nullcontext)():
                importlib.import_module(package)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds packages as Python does, and has them executed inside their context."""

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns how to import a package that has a context; None for all others."""
        if name not in _contexts or name in _used:
            return None
        # Lets the call below find the package by the other finders. Who asks may not import it.
        _used.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            _used.discard(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_inside(module: types.ModuleType) -> None:
                _used.add(name)
                with _contexts[name]():
                    execute(module)

            spec.loader.exec_module = execute_inside
        return spec


_finder = _Finder()

# A device of jax, which has no types: its class is in jaxlib's compiled part.
Device: TypeAlias = Any

if TYPE_CHECKING:
    import jax
    import jax.export as jax_export
    import jax.numpy as jnp
    import keras
    import orbax.checkpoint as ocp
    import tensorflow as tf
    import tensorflow_text as tf_text
    from jax._src import clusters, distributed
    from jax._src import config as jax_config
    from jax._src.cudnn import fused_attention_stablehlo as cudnn_attention
    from jax.experimental import multihost_utils, pallas, serialize_executable
    from jax.experimental.pallas import tpu as pallas_tpu
    from jax.experimental.pallas import triton as pallas_triton
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as splash_masks,
    )
    from jax.extend import core as jax_core
    from jax.interpreters import mlir
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import func, sdy, stablehlo
    from jaxlib.mosaic.python import tpu as mosaic
    from jaxlib.triton import dialect as triton
    from sacrebleu.metrics import bleu, chrf
    from scipy import optimize, sparse
    from scipy.sparse import csgraph
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops
    from tensorflow.python.compiler.xla.experimental import xla_sharding
    from tensorflow.python.framework import op_callbacks, ops
    from tensorflow.python.ops.parallel_for import control_flow_ops, pfor

    # Compiled, and without types.
    pywrap_tfe: Any
    # Its package has a function of the same name.
    megablox: Any
    # Dialects of MLIR that Pallas lowers to; its own module has no types for them.
    triton_lowering: Any
else:
    tf = LazyModule("tensorflow")
    tf_text = LazyModule("tensorflow_text")
    gen_xla_ops = PrivateModule("tensorflow.compiler.tf2xla.ops.gen_xla_ops")
    xla_sharding = PrivateModule("tensorflow.python.compiler.xla.experimental.xla_sharding")
    pywrap_tfe = PrivateModule("tensorflow.python.pywrap_tfe")
    op_callbacks = PrivateModule("tensorflow.python.framework.op_callbacks")
    ops = PrivateModule("tensorflow.python.framework.ops")
    control_flow_ops = PrivateModule("tensorflow.python.ops.parallel_for.control_flow_ops")
    pfor = PrivateModule("tensorflow.python.ops.parallel_for.pfor")

    jax = LazyModule("jax")
    jnp = LazyModule("jax.numpy")
    jax_export = LazyModule("jax.export")
    multihost_utils = LazyModule("jax.experimental.multihost_utils")
    serialize_executable = LazyModule("jax.experimental.serialize_executable")
    jax_core = LazyModule("jax.extend.core")
    mlir = LazyModule("jax.interpreters.mlir")
    jax_config = LazyModule("jax._src.config")
    clusters = LazyModule("jax._src.clusters")
    distributed = LazyModule("jax._src.distributed")
    ir = LazyModule("jaxlib.mlir.ir")
    func = LazyModule("jaxlib.mlir.dialects.func")
    sdy = LazyModule("jaxlib.mlir.dialects.sdy")
    stablehlo = LazyModule("jaxlib.mlir.dialects.stablehlo")
    mosaic = LazyModule("jaxlib.mosaic.python.tpu")
    triton = LazyModule("jaxlib.triton.dialect")

    pallas = LazyModule("jax.experimental.pallas")
    pallas_tpu = LazyModule("jax.experimental.pallas.tpu")
    pallas_triton = LazyModule("jax.experimental.pallas.triton")
    triton_lowering = LazyModule("jax._src.pallas.triton.lowering")
    cudnn_attention = LazyModule("jax._src.cudnn.fused_attention_stablehlo")
    _splash = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention"
    splash = LazyModule(f"{_splash}_kernel")
    splash_masks = LazyModule(f"{_splash}_mask")
    megablox = LazyModule("jax.experimental.pallas.ops.tpu.megablox.gmm")

    ocp = LazyModule("orbax.checkpoint")
    # The package of this name within ours is lingvo_gshard.keras.
    keras = LazyModule("keras")

    optimize = LazyModule("scipy.optimize")
    sparse = LazyModule("scipy.sparse")
    csgraph = LazyModule("scipy.sparse.csgraph")
    bleu = LazyModule("sacrebleu.metrics.bleu")
    chrf = LazyModule("sacrebleu.metrics.chrf")
