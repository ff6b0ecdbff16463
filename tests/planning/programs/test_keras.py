# tests: wings/planning/programs/jax_program.py, wings/planning/programs/planned.py
"""Plans a step of Keras on JAX, which knows nothing of this package, and compares closed forms."""

import pathlib
import subprocess
import sys

import pytest

import lingvo_gshard

ROWS, MODEL, HIDDEN, DEVICES, FLOAT = 32, 64, 256, 8, 4


@pytest.mark.slow
def test_a_step_of_keras_is_planned(tmp_path):
    script = pathlib.Path(__file__).with_name("export_keras.py")
    path = tmp_path / "keras.bin"
    subprocess.run([sys.executable, script, path], check=True, timeout=300)
    plan = lingvo_gshard.plan(path, f"cpu:{DEVICES}")
    weights = 2 * MODEL * HIDDEN + MODEL + HIDDEN
    sizes = plan.bytes_per_device
    assert sizes.weights == FLOAT * weights
    # Two moments; the learning rate and the number of steps have 4 bytes each.
    assert sizes.moments == 2 * FLOAT * weights + 2 * 4
    product = 2 * ROWS * MODEL * HIDDEN // DEVICES
    flops = {(row.layer, row.phase): row.flops for row in plan.layers if row.flops}
    assert flops == {
        ("expand", "forward"): product,
        ("contract", "forward"): product,
        ("contract", "backward"): 2 * product,
        ("expand", "backward"): product,
    }
    moved = sum(row.bytes * row.count for row in plan.collectives if row.axis == "data")
    assert moved == FLOAT * weights
