"""Compiler settings of the tests: cheap code generation, and a cache of compiled programs."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import pathlib
import platform
import time

_CACHED_DAYS = 14
_PACKAGES = ("tensorflow", "jax", "jaxlib")


def set_environment() -> None:
    """Sets the environment variables that TensorFlow and jax read when they are imported.

    Tests run tiny models once, so they spend their time compiling. LLVM's optimizations are off:
    they change neither the HLO that tests inspect nor, beyond rounding, any result. Compiled
    programs are kept in the user's cache directory, where the key of an entry is the program. The
    directory is named for the versions and the processor that produced them.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
    _add_flag("XLA_FLAGS", "--xla_backend_optimization_level=0")
    cache = _cache_directory()
    for name in ("jax", "tensorflow"):
        (cache / name).mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache / "jax"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    _add_flag("TF_XLA_FLAGS", f"--tf_xla_persistent_cache_directory={cache / 'tensorflow'}")
    _add_flag("TF_XLA_FLAGS", "--tf_xla_persistent_cache_device_types=CPU")


def remove_old_programs() -> None:
    """Deletes cached programs that no test has written for two weeks."""
    oldest = time.time() - _CACHED_DAYS * 24 * 3600
    for file in _cache_directory().parent.rglob("*"):
        if file.is_file() and file.stat().st_mtime < oldest:
            file.unlink(missing_ok=True)


def _cache_directory() -> pathlib.Path:
    root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    versions = [importlib.metadata.version(package) for package in _PACKAGES]
    identity = " ".join([*versions, platform.machine(), _processor()])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return pathlib.Path(root) / "lingvo_gshard" / "tests" / digest


def _processor() -> str:
    """The processor's instruction sets: code compiled for more of them would not run."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _add_flag(variable: str, flag: str) -> None:
    flags = os.environ.get(variable, "").split()
    if flag.partition("=")[0] not in [given.partition("=")[0] for given in flags]:
        os.environ[variable] = " ".join([*flags, flag])
