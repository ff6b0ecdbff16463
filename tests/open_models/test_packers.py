"""Tests what imports are written as in FP8, MXFP4 and NVFP4, against loops over their blocks."""

import json

import ml_dtypes
import numpy as np
import pytest

import lingvo_gshard as gshard
from lingvo_gshard.wings.open_models import packed, packers
from lingvo_gshard.wings.open_models.shards import Published, read_headers
from tests.open_models.test_packed import (
    BLOCK,
    COMPRESSED,
    FP4,
    MODELOPT,
    digests,
    mxfp4_by_loops,
    nvfp4_by_loops,
    pack_by_loops,
    write_fp8,
    write_mxfp4,
    write_nvfp4,
)

KINDS = {
    "mxfp4": write_mxfp4,
    "modelopt": lambda path: write_nvfp4(path, MODELOPT),
    "compressed": lambda path: write_nvfp4(path, COMPRESSED),
}


def unpacked(directory):
    """Returns name -> float32 of a model in 4 bits, by the reader."""
    config = json.loads((directory / "config.json").read_text())
    found = packed.unpack(read_headers(directory), config["quantization_config"], "c")
    return {name: tensor.read().astype(np.float32) for name, tensor in found.items()}


@pytest.mark.parametrize("precision", ["float32", "bfloat16_weights"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_4_bits_comes_back(kind, precision, tmp_path):
    source, out = tmp_path / "model", tmp_path / "out"
    meaning = KINDS[kind](source)
    gshard.import_model(source, tmp_path / "run", length=16, precision=precision)
    gshard.load(tmp_path / "run").export(out, "huggingface_4bit")
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()
    found = unpacked(out)
    assert found.keys() == meaning.keys()
    for name, expected in meaning.items():
        np.testing.assert_array_equal(found[name], expected, err_msg=name)
    assert digests(out) == digests(source)


@pytest.mark.parametrize("largest", [1, 2, 3, 4, 5, 6, 7])
def test_blocks_with_small_values_keep_their_values(largest, tmp_path):
    """The scale of a block need not be the one that makes its largest magnitude 6."""
    codes = np.random.default_rng(0).integers(0, largest + 1, (2, 32), np.uint8)
    codes[:, ::16] = largest
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    narrow = np.array([[1.5, 2.25], [13, 0.875]], ml_dtypes.float8_e4m3fn)
    weight = nvfp4_by_loops(pairs, narrow, np.float32(0.003), False)
    of_all, values, scales = nvfp4_packer(tmp_path, (2, 32), 0.003, False).pack(weight)
    np.testing.assert_array_equal(nvfp4_by_loops(values, scales, of_all, False), weight)
    exponents = np.array([[[120], [125]]], np.uint8)
    weight = mxfp4_by_loops(pairs.reshape(1, 2, 1, 16), exponents)
    blocks, scales = packers.Mxfp4Packer("w", weight.shape, ()).pack(weight)
    np.testing.assert_array_equal(mxfp4_by_loops(blocks, scales), weight)


def test_a_model_that_was_not_in_4_bits_is_refused(tmp_path):
    write_fp8(tmp_path / "model")
    gshard.import_model(tmp_path / "model", tmp_path / "run")
    with pytest.raises(ValueError, match="no tensor of the imported model was in MXFP4 or NVFP4"):
        gshard.load(tmp_path / "run").export(tmp_path / "out", "huggingface_4bit")
    assert not (tmp_path / "out").exists()


def nearest(value):
    """Returns the value of FP4 that is nearest."""
    return min(FP4, key=lambda each: abs(each - value))


def test_changed_blocks_in_mxfp4_have_the_better_of_two_scales():
    weight = np.random.default_rng(0).normal(size=(2, 64, 3)).astype(np.float32)
    blocks, scales = packers.Mxfp4Packer("w", weight.shape, ()).pack(weight)
    found, ups = mxfp4_by_loops(blocks, scales), set()
    for e, g, r in np.ndindex(2, 2, 3):
        group = weight[e, 32 * g : 32 * (g + 1), r]
        low = int(np.floor(np.log2(np.abs(group).max()))) - 2
        errors = {
            power: sum((nearest(v / 2.0**power) * 2.0**power - v) ** 2 for v in group)
            for power in (low, low + 1)
        }
        best = min(errors, key=lambda power: errors[power])
        ups.add(best - low)
        assert scales[e, r, g] == best + 127
        expected = [nearest(v / 2.0**best) * 2.0**best for v in group]
        np.testing.assert_array_equal(found[e, 32 * g : 32 * (g + 1), r], expected)
    assert ups == {0, 1}


@pytest.mark.parametrize("divides", [False, True])
def test_changed_blocks_in_nvfp4_have_the_best_of_seven_scales(divides, tmp_path):
    weight = np.random.default_rng(0).normal(size=(4, 48)).astype(np.float32)
    one = np.float32(0.002)
    packer = nvfp4_packer(tmp_path, weight.shape, 1 / one if divides else one, divides)
    of_all, values, scales = packer.pack(weight)
    assert of_all == (1 / one if divides else one)
    found = nvfp4_by_loops(values, scales, of_all, divides)
    for row, group in np.ndindex(4, 3):
        block = weight[row, 16 * group : 16 * (group + 1)]
        errors = []
        for level in (6, 4, 3, 2, 1.5, 1, 0.5):
            narrow = np.float32(np.abs(block).max() / (level * one))
            scale = np.float32(np.minimum(narrow, 448).astype(ml_dtypes.float8_e4m3fn)) * one
            clipped = np.clip(block / scale, -6, 6)
            errors.append(
                sum((nearest(c) * scale - v) ** 2 for c, v in zip(clipped, block, strict=True))
            )
        error = np.square(found[row, 16 * group : 16 * (group + 1)] - block).sum()
        np.testing.assert_allclose(error, min(errors), rtol=1e-5)
    only_six = errors[0]
    assert only_six >= min(errors)


def nvfp4_packer(tmp_path, shape, of_all, divides):
    """Returns the packer of a tensor with this scale of all values."""
    file = tmp_path / "small"
    file.write_bytes(np.float32(of_all).tobytes())
    of_all = Published("of_all", (), "F32", file)
    return packers.Nvfp4Packer("w.weight", shape, (), "w.weight", of_all, divides)


@pytest.mark.parametrize("divides", [False, True])
def test_weights_that_grew_beyond_all_scales_get_another_scale_of_all(divides, tmp_path):
    weight = np.random.default_rng(0).normal(size=(4, 48)).astype(np.float32)
    packer = nvfp4_packer(tmp_path, weight.shape, 1e5 if divides else 1e-5, divides)
    of_all, values, scales = packer.pack(weight)
    largest = np.abs(weight).max() / (448 * 6)
    np.testing.assert_allclose(of_all, 1 / largest if divides else largest, rtol=1e-6)
    found = nvfp4_by_loops(values, scales, of_all, divides)
    assert np.abs(found - weight).max() < 0.2 * np.abs(weight).max()
    np.testing.assert_allclose(np.abs(found).max(), np.abs(weight).max(), rtol=1e-6)


def test_blocks_of_zeros_stay_zeros(tmp_path):
    zeros = np.zeros((2, 32), np.float32)
    of_all, values, scales = nvfp4_packer(tmp_path, (2, 32), 1.0, False).pack(zeros)
    assert not nvfp4_by_loops(values, scales, of_all, False).any()
    blocks, exponents = packers.Mxfp4Packer("w", (1, 32, 2), ()).pack(zeros.reshape(1, 32, 2))
    assert not mxfp4_by_loops(blocks, exponents).any()


def test_one_scale_makes_the_largest_value_of_a_changed_matrix_the_largest_of_fp8():
    values, scales, meaning = pack_by_loops(np.eye(6, 8, dtype=np.float32), (6, 8))
    same, kept = packers.pack_fp8(meaning, scales.reshape(()), (0, 0))
    np.testing.assert_array_equal(same, values)
    assert kept.shape == () and kept == scales[0, 0]
    found, fresh = packers.pack_fp8(3 * meaning, scales.reshape(()), (0, 0))
    np.testing.assert_allclose(fresh, 3 * scales[0, 0], rtol=1e-6)
    np.testing.assert_array_equal(found, values)


def test_only_blocks_that_changed_get_another_scale():
    rng = np.random.default_rng(0)
    values, scales, meaning = pack_by_loops(rng.normal(size=(10, 8)).astype(np.float32))
    changed = meaning.copy()
    changed[5, 4] = 9.0
    found, fresh = packers.pack_fp8(changed, scales, BLOCK)
    assert (np.argwhere(fresh != scales) == [[1, 1]]).all()
    others = np.ones(values.shape, bool)
    others[4:8, 3:6] = False
    np.testing.assert_array_equal(found[others].view(np.uint8), values[others].view(np.uint8))
    expected, fresh_by_loops, _ = pack_by_loops(changed)
    np.testing.assert_array_equal(found[4:8, 3:6], expected[4:8, 3:6])
    assert fresh[1, 1] == fresh_by_loops[1, 1] == np.float32(9) / np.float32(448)
