"""Checks the names that clouds give to machines."""

import pytest

from lingvo_gshard.wings.planning.machines import chips, cloud_names, topologies

# Chips of a slice, as Google's tables list them beside the name and the shape.
SLICES = [
    ("v2-8", "v2:2x2", 4),
    ("v3-2048", "v3:32x32", 1024),
    ("v4-8", "v4:2x2x1", 4),
    ("v4-16", "v4:2x2x2", 8),
    ("v4-32", "v4:2x2x4", 16),
    ("v4-64", "v4:2x4x4", 32),
    ("v4-128", "v4:4x4x4", 64),
    ("v4-256", "v4:4x4x8", 128),
    ("v5p-1536", "v5p:8x8x12", 768),
    ("v5p-12288", "v5p:16x16x24", 6144),
    ("v5litepod-16", "v5e:4x4", 16),
    ("v5litepod-8", "v5e:2x4", 8),
    ("v5e-128", "v5e:8x16", 128),
    ("v6e-16", "v6e:4x4", 16),
    ("V6E-256", "v6e:16x16", 256),
    ("tpu7x-128", "tpu7x:4x4x4", 64),
    ("v5p-128*4", "v5p:4x4x4*4", 256),
]


@pytest.mark.parametrize(("name", "expected", "count"), SLICES)
def test_slices_have_the_chips_and_shapes_that_google_lists(name, expected, count):
    found = topologies.get(name)
    assert (found.name, found.chips) == (expected, count)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a3-highgpu-8g", "gpu:h100:1x8"),
        ("a3-highgpu-8g*4", "gpu:h100:4x8"),
        ("A2-ULTRAGPU-8G", "gpu:a100:1x8"),
        ("a4-highgpu-8g", "gpu:b200:1x8"),
        ("p5.48xlarge", "gpu:h100:1x8"),
        ("p4d.24xlarge", "gpu:a100-40gb:1x8"),
        ("Standard_ND96isr_H100_v5", "gpu:h100:1x8"),
        ("ND96isr H100 v5", "gpu:h100:1x8"),
        ("H100", "gpu:h100:1x1"),
        ("8xH100", "gpu:h100:1x8"),
        ("16 x H100", "gpu:h100:2x8"),
        ("12xH100", "gpu:h100:2x6"),
        ("A100-80GB:8", "gpu:a100:1x8"),
        ("gpu:a100-80gb:1x8", "gpu:a100:1x8"),
        ("GPU:H100:8x4", "gpu:h100:8x4"),
        ("cpu:8", "cpu:8"),
        ("a4x-highgpu-4g", "gpu:gb200:1x4"),
        ("a4x-highgpu-4g*18", "gpu:gb200:1x72"),
        ("p6e-gb200.36xlarge*36", "gpu:gb200:2x72"),
        ("72xGB200", "gpu:gb200:1x72"),
        ("a3-highgpu-1g*4", "gpu:h100:4x1"),
    ],
)
def test_machines_and_gpus_are_hosts_by_gpus(name, expected):
    assert topologies.get(name).name == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("v5p-7", "there is no such size. Nearest: v5p-2 and v5p-8$"),
        ("v5p-3", "Nearest: v5p-2 and v5p-8$"),
        ("v6e-5", "Nearest: v6e-4 and v6e-8$"),
        ("v6e-0", "Nearest: v6e-1$"),
        ("v5e-260", "Nearest: v5e-256$"),
        ("v5litepod-12", "Nearest: v5litepod-8 and v5litepod-16$"),
        ("v4-7", "Nearest: v4-2 and v4-8$"),
        ("9xH100", "Nearest: 8xH100 and 10xH100$"),
        ("H100:0", "Nearest: H100:1$"),
        ("cpu:5000", "expected at most 4096"),
        ("h100x0", "unknown kind of chip 'h100x0'.*8xH100. Did you mean 'h100'"),
        ("p5.48xlarg", "Did you mean 'p5.48xlarge'"),
        ("a3-highgpu-8g*x", "unknown kind of chip"),
        ("v5e-512", "a pod of TPU v5e has 256 chips"),
        ("gpu:a100-80gb", "'' is not a shape; expected 2 sizes, such as gpu:a100:8x4"),
        ("8xH100:8", "unknown kind of chip"),
    ],
)
def test_other_names_are_refused_with_examples(name, message):
    with pytest.raises(ValueError, match=message):
        topologies.get(name)


def test_every_machine_has_gpus_that_can_be_planned():
    for name, (key, count) in cloud_names.MACHINES.items():
        assert topologies.get(name).devices == count and chips.get(key).kind == "gpu"
    assert {chips.get(key).kind for key in cloud_names.GPUS.values()} == {"gpu"}


def test_the_names_are_listed():
    assert "v5litepod-16" in topologies.listing() and "8xH100" in topologies.listing()
