# tests: wings/planning/machines/topologies.py, wings/planning/machines/compilers.py
"""Checks topologies by name, and libtpu's devices for them."""

import pathlib
import shlex
import subprocess
import sys

import jax
import numpy as np
import pytest

from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.wings.planning.machines import chips, compilers, cuda, interconnect, topologies

ROOT = pathlib.Path(__file__).resolve().parents[3]
KEYS = [chip.key for chip in chips.CHIPS.values() if chip.kind == "tpu"]


@pytest.mark.parametrize(
    "name,devices,hosts,wraps",
    [
        ("v2:16x16", 512, 64, (True, True)),
        ("v3:32x32", 2048, 256, (True, True)),
        ("v3:16x16", 512, 64, (False, False)),
        ("v3:16x32", 1024, 128, (False, True)),
        ("v4:4x4x8", 128, 32, (True, True, True)),
        ("v4:2x2x4", 16, 4, (False, False, False)),
        ("v5e:8x16", 128, 32, (False, True)),
        ("v5e:1x1", 1, 1, (False, False)),
        ("v5p:2x2x1", 4, 1, (False, False, False)),
        ("v6e:16x16", 256, 64, (True, True)),
        ("tpu7x:2x2x1", 8, 1, (False, False, False)),
        ("v5p:2x2x1*4", 16, 4, (False, False, False)),
        ("v5e:16x16*2", 512, 128, (True, True)),
        ("tpu7x:2x2x1*2", 16, 2, (False, False, False)),
        ("gpu:h100:8x4", 32, 8, (False, False)),
        ("cpu:8", 8, 1, (False,)),
    ],
)
def test_topology_names_give_devices_hosts_and_wraparound(name, devices, hosts, wraps):
    topology = topologies.get(name)
    assert topology.name == name
    assert topology.devices == devices
    assert topology.hosts == hosts
    assert topology.wraps == wraps
    assert topology.kind == topology.chip.kind


def test_slices_count_for_chips_and_one_slice_needs_no_number():
    topology = topologies.get("tpu7x:2x2x1*2")
    assert (topology.slices, topology.chips, topology.shape) == (2, 8, (2, 2, 1))
    assert topologies.get("v4:4x4x4*1") == topologies.get("v4:4x4x4")


def test_gpu_shapes_are_hosts_times_gpus():
    topology = topologies.get("gpu:h100:8x4")
    assert topology.shape == (8, 4)
    assert topology.chip.key == "h100"
    word = "estimate" if topology.compiler == "cpu" else "autotuning"
    assert word in topology.notes[0]


@pytest.mark.parametrize(
    "name,message",
    [
        ("", "unknown kind of chip ''.*v3:32x32.*gpu:h100:8x4"),
        ("v33:2x2", "`topology=v33:2x2`: unknown kind of chip 'v33'.*Did you mean 'v3'"),
        ("v3", "'' is not a shape; expected 2 sizes, such as v3:32x32"),
        ("v3:abc", "'abc' is not a shape; expected 2 sizes"),
        ("v3:4x4x4", "'4x4x4' is not a shape; expected 2 sizes"),
        ("v3:0x4", "'0x4' is not a shape"),
        ("v4:4x4", "expected 3 sizes, such as v4:8x8x8"),
        ("v3:3x4", "a host has 2x2 chips"),
        ("v3:64x64", "a pod of TPU v3 has 1,024 chips, 32x32"),
        ("v6e:2x64", "a pod of TPU v6e has 256 chips, 16x16"),
        ("gpu:h10:8x4", "unknown GPU 'h10'. Did you mean 'h100'"),
        ("gpu:h100:8", "expected 2 sizes, such as gpu:h100:8x4"),
        ("gpu:h100", "'' is not a shape"),
        ("gpu:h100:2x32", "32 GPUs of one host were given; NVLink connects 8 of NVIDIA H100 SXM"),
        ("gpu:gb200:1x144", "connects 72 of NVIDIA GB200 NVL72. Expected such as gpu:gb200:8x72"),
        ("v5p:8x8x8*0", "'0' is not a number of slices; expected a positive .* v5p:8x8x8.4"),
        ("v5p:8x8x8*x", "'x' is not a number of slices"),
        ("v5p:8x8x8*", "'' is not a number of slices"),
        ("v5p:8x8*2", "'8x8' is not a shape; expected 3 sizes"),
        ("v4:4x4x4*2", "slices of TPU v4 is not published; .* v5e, v5p, v6e, tpu7x"),
        ("gpu:h100:8x4*2", "only TPUs form slices; expected such as gpu:h100:8x4"),
        ("cpu:8*2", "only TPUs form slices"),
        ("cpu:many", "expected one size, such as cpu:8"),
        ("cpu:100000", "at most 4096 virtual devices"),
    ],
)
def test_unknown_names_are_errors(name, message):
    with pytest.raises(ValueError, match=message):
        topologies.get(name)


def test_listing_has_one_line_per_kind_of_chip():
    lines = topologies.listing().splitlines()
    for key in KEYS:
        (line,) = [line for line in lines if line.startswith(key + ":")]
        assert chips.get(key).name in line
    (line,) = [line for line in lines if line.startswith("v3:32x32")]
    assert line.split()[1:] == "TPU v3 2,048 15.48 GiB 61.5 TFLOP/s 82 GB/s".split() + [
        topologies.get("v3:32x32").compiler
    ]
    assert any(line.startswith("gpu:h100:") for line in lines)


def test_without_libtpu_the_cpu_compiler_is_used(monkeypatch):
    monkeypatch.setattr(compilers, "installed", lambda: None)
    topology = topologies.get("v3:2x2")
    assert topology.compiler == "cpu"
    for text in (topology.notes[0], topology.compiler_choice, topologies.listing()):
        assert "libtpu is not installed" in text and compilers.INSTALL in text
    assert [device.platform for device in topology.compile_devices()] == ["cpu"] * 8
    with pytest.raises(ValueError, match="libtpu is not installed"):
        compilers.check_version()


def test_install_command_installs_the_tested_version_for_this_python():
    python, *_, version = shlex.split(compilers.INSTALL)
    assert python == sys.executable
    assert version in (ROOT / "constraints.txt").read_text().splitlines()
    assert f'"plan": ["{version}"]' in (ROOT / "setup.py").read_text()


def test_the_choice_of_the_compiler_is_explained(monkeypatch):
    monkeypatch.setattr(compilers, "installed", lambda: "1.2.3")
    monkeypatch.setattr(cuda, "installed", lambda: "4.5.6")
    expected = {
        "v5e:2x4": "libtpu 1.2.3 compiles the step: it is the compiler of TPU v5e",
        "gpu:h100:1x8": "XLA's compiler for GPUs (jax-cuda12-pjrt 4.5.6) compiles the step for",
        "cpu:8": "Its figures are an estimate: a device is one core of",
    }
    for name, words in expected.items():
        assert words in topologies.get(name).compiler_choice


def test_mismatched_libtpu_version_is_reported(monkeypatch):
    monkeypatch.setattr(compilers, "installed", lambda: "0.0.1")
    with pytest.raises(ValueError, match=r"libtpu 0.0.1 is installed, .* requires libtpu=="):
        topologies.get("v3:2x2").compile_devices()


def test_too_many_virtual_cpu_devices_are_rejected():
    started = len(jax.devices("cpu"))
    with pytest.raises(ValueError, match=rf"`topology=cpu:{started + 1}` needs .* in a new proc"):
        topologies.get(f"cpu:{started + 1}").compile_devices()


def test_two_thousand_virtual_cpu_devices_are_supported():
    program = (
        "from lingvo_gshard.wings.planning.machines import topologies\n"
        "print(len(topologies.get('cpu:2048').compile_devices()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert result.stdout.split() == ["2048"], result.stderr


@pytest.mark.parametrize(
    "name",
    [
        "v2:4x4",
        "v3:4x8",
        "v4:4x4x4",
        "v5e:1x1",
        "v5e:16x16",
        "v5p:2x2x4",
        "tpu7x:4x4x4",
        "v5e:4x4*3",
    ],
)
def test_libtpu_device_coordinates_match_the_interconnect_model(name):
    pytest.importorskip("libtpu")
    topology = topologies.get(name)
    devices = topology.compile_devices()
    assert len(devices) == topology.devices
    network = interconnect.make_network(topology, Mesh((("all", topology.devices),)))
    expected = [device.coords[: len(topology.shape)] for device in devices]
    np.testing.assert_array_equal(network.coordinates[network.node_of], expected)


@pytest.mark.parametrize("key", KEYS)
def test_libtpu_reports_the_listed_memory_for_every_generation(key):
    pytest.importorskip("libtpu")
    shape = "x".join(["2", "2", "1"][: chips.get(key).torus_dimensions])
    topology = topologies.get(f"{key}:{shape}")
    mesh = jax.sharding.Mesh(np.array(topology.compile_devices()), ("all",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def compiled(size):
        value = jax.ShapeDtypeStruct((1024, size // 1024), np.uint8, sharding=sharding)
        return jax.jit(lambda x: x + 1).lower(value).compile()

    assert "u8[1024" in compiled(2**20).as_text()
    gibibytes = topology.chip.usable_bytes / 2**30
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"available HBM \({gibibytes:.2f}G\)"):
        compiled(2**40)


def test_several_processes_can_compile_at_once():
    pytest.importorskip("libtpu")
    program = (
        "import sys\n"
        "from lingvo_gshard.wings.planning.machines import topologies\n"
        "print(len(topologies.get('v3:2x2').compile_devices()), flush=True)\n"
        "sys.stdin.read()"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        # Each process holds libtpu until its standard input closes.
        assert [process.stdout.readline() for process in started] == ["8\n", "8\n"]
    finally:
        for process in started:
            process.communicate()


def test_compiler_options_appear_in_the_notes(monkeypatch):
    monkeypatch.setattr(compilers, "installed", lambda: "0.0.1")
    monkeypatch.delenv(compilers.OPTIONS, raising=False)
    assert topologies.get("v3:2x2").notes == ()
    monkeypatch.setenv(compilers.OPTIONS, "--xla_tpu_enable_async_all_to_all=true")
    (note,) = topologies.get("v3:2x2").notes
    assert note == "compiled with LIBTPU_INIT_ARGS=--xla_tpu_enable_async_all_to_all=true"
    assert topologies.get("cpu:8").notes != (note,)


@pytest.mark.parametrize(
    ("name", "times", "expected"),
    [
        ("v5p:4x4x4", 2, "v5p:4x4x8"),
        ("v5e:2x4", 2, "v5e:4x4"),
        ("v5e:16x16", 2, None),
        ("v5e:4x4*2", 2, "v5e:4x8*2"),
        ("gpu:h100:1x4", 2, "gpu:h100:1x8"),
        ("gpu:h100:1x4", 8, "gpu:h100:4x8"),
        ("gpu:h100:3x8", 2, "gpu:h100:6x8"),
        ("cpu:4", 2, "cpu:8"),
    ],
)
def test_a_larger_machine_has_the_same_chips(name, times, expected):
    topology = topologies.get(name)
    found = topologies.larger(topology, times)
    assert (found and found.name) == expected
    assert found is None or found.devices == times * topology.devices
