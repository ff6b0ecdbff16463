"""Tests weights that are published in FP8, MXFP4 or NVFP4, against loops over their blocks.

The slow tests compare with what transformers makes of the same files.
"""

import hashlib
import json
import os
import subprocess

import ml_dtypes
import numpy as np
import pytest

import lingvo_gshard as gshard
from benchmarks.peer_python import find_python
from lingvo_gshard.wings.open_models import packed
from lingvo_gshard.wings.open_models.importing import PublishedModel
from lingvo_gshard.wings.open_models.shards import Tensor, plan_files, read_headers, write_file
from tests.open_models import published
from tests.open_models.translation import models

BLOCK = (4, 3)
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
ONE_SCALE = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
TYPES = {"float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "uint8": "U8"}
# Written out from arXiv 2310.10537, section 5.1: sign, two bits of exponent, one of mantissa.
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
MXFP4_CASE = "gpt_oss, sinks, clamped gates, biases, YaRN"
# transformers loads no FP8 without accelerate, so its operation is called.
PEERS = {
    "fp8": """
import sys, numpy, safetensors.torch, torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
raw = safetensors.torch.load_file(sys.argv[1] + "/model.safetensors")
unpack = Fp8Dequantize(None)._dequantize_one
found = {
    name: unpack(value, raw[name + "_scale_inv"], torch.float32)
    if name + "_scale_inv" in raw else value.float()
    for name, value in raw.items() if not name.endswith("_scale_inv")
}
numpy.savez(sys.argv[2], **{name: value.numpy() for name, value in found.items()})
""",
    "mxfp4": """
import sys, numpy, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(
    sys.argv[1], quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.float32
)
numpy.savez(sys.argv[2], **{name: value.numpy() for name, value in model.state_dict().items()})
""",
    "nvfp4": """
import sys, numpy, safetensors.torch, torch
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization.lifecycle.forward import dequantize
raw = safetensors.torch.load_file(sys.argv[1] + "/model.safetensors")
found = {name: value.float() for name, value in raw.items() if name.endswith("norm.weight")}
for name, packed in raw.items():
    base, _, kind = name.rpartition(".")
    if kind == "weight_packed":
        values = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1])
        scale = raw[base + ".weight_scale"].float()
        one = raw[base + ".weight_global_scale"]
        found[base + ".weight"] = dequantize(values.float(), scale, global_scale=one)
numpy.savez(sys.argv[2], **{name: value.numpy() for name, value in found.items()})
""",
}


def write_tensors(directory, tensors):
    """Replaces the weights of a model by these arrays, in their own types."""
    headers = [Tensor(name, a.shape, TYPES[str(a.dtype)]) for name, a in tensors.items()]
    (directory / "model.safetensors").unlink(missing_ok=True)
    (file,) = plan_files(headers, directory)
    write_file(file, (tensors[tensor.name] for tensor in file))


def pack_by_loops(matrix, block=BLOCK):
    """Returns a matrix in FP8 and the scales of its blocks, and what they stand for."""
    rows, columns = (-(-size // part) for size, part in zip(matrix.shape, block, strict=True))
    values = np.zeros(matrix.shape, ml_dtypes.float8_e4m3fn)
    scales, meaning = np.zeros((rows, columns), np.float32), np.zeros(matrix.shape, np.float32)
    for i in range(rows):
        for j in range(columns):
            at = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            scales[i, j] = np.abs(matrix[at]).max() / np.float32(448)
            values[at] = (matrix[at] / scales[i, j]).astype(values.dtype)
            meaning[at] = values[at].astype(np.float32) * scales[i, j]
    return values, scales, meaning


def write_fp8(directory, **config):
    """Writes a Llama whose matrices but the embeddings are in FP8; returns name -> float32."""
    tensors = published.write(directory, quantization_config=FP8 | config)
    written, meaning = {}, {}
    for name, tensor in tensors.items():
        written[name] = tensor.astype(ml_dtypes.bfloat16)
        meaning[name] = written[name].astype(np.float32)
        if "_proj" in name:
            values, scales, meaning[name] = pack_by_loops(tensor)
            written |= {name: values, f"{name}_scale_inv": scales}
    write_tensors(directory, written)
    return meaning


def write_fp8_with_one_scale(directory, shape=()):
    """Writes a Llama in FP8 whose matrices have one scale each, and one for their input."""
    tensors = published.write(directory, quantization_config=ONE_SCALE)
    written, meaning = {}, {}
    for number, (name, tensor) in enumerate(tensors.items()):
        written[name] = tensor.astype(ml_dtypes.bfloat16)
        meaning[name] = written[name].astype(np.float32)
        if "_proj" in name:
            values, scales, meaning[name] = pack_by_loops(tensor, tensor.shape)
            written |= {name: values, f"{name}_scale_inv": scales.reshape(shape)}
            place = name.removesuffix("weight") + "activation_scale"
            written[place] = np.full(shape, number + 0.5, np.float32)
    write_tensors(directory, written)
    return meaning


def digests(directory):
    """Returns name -> (type, digest) of a model's tensors, packed ones as they are packed."""
    return {
        name: (tensor.dtype, hashlib.sha256(tensor.read().tobytes()).hexdigest())
        for name, tensor in read_headers(directory).items()
    }


@pytest.mark.parametrize("precision", ["float32", "bfloat16_weights"])
def test_a_model_in_fp8_is_imported_and_exported_in_every_bit(precision, tmp_path):
    source, out = tmp_path / "model", tmp_path / "out"
    meaning = write_fp8(source)
    found = gshard.import_model(source, tmp_path / "run", precision=precision)
    assert found.tensors == len(meaning)
    run = gshard.load(tmp_path / "run")
    query = np.asarray(run.model.theta.decoder.layers.body[0].self_attention.w_query)
    for layer, weight in enumerate(query):
        expected = meaning[f"model.layers.{layer}.self_attn.q_proj.weight"]
        expected = expected.reshape(published.HEADS, published.SIZE, -1).transpose(2, 0, 1)
        np.testing.assert_array_equal(weight, expected.astype(weight.dtype))
    run.export(out, "huggingface")
    assert digests(out) == digests(source)
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()
    gshard.import_model(out, tmp_path / "again")


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale_of_a_matrix_and_one_of_its_input_come_back(shape, tmp_path):
    source, out = tmp_path / "model", tmp_path / "out"
    meaning = write_fp8_with_one_scale(source, shape)
    params = gshard.open_model(source / "config.json", length=16)
    tensors = PublishedModel.open(source, params).tensors
    assert tensors.keys() == meaning.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.read().astype(np.float32), meaning[name])
    gshard.import_model(source, tmp_path / "run")
    gshard.load(tmp_path / "run").export(out, "huggingface")
    assert digests(out) == digests(source)
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_parts_of_a_packed_matrix_are_those_of_the_whole(tmp_path):
    write_fp8(tmp_path / "model")
    raw = read_headers(tmp_path / "model")
    tensor = packed.unpack(raw, FP8, "c")["model.layers.0.mlp.gate_proj.weight"]
    whole = tensor.read()
    for box in ([(0, 12), (0, 8)], [(3, 9), (2, 7)], [(4, 8), (3, 6)], [(11, 12), (7, 8)]):
        part, _ = tensor.read_box(box)
        np.testing.assert_array_equal(part, whole[tuple(slice(*span) for span in box)])


def write_mxfp4(directory):
    """Writes a gpt-oss whose experts are in MXFP4; returns name -> float32."""
    tensors = models.write(
        directory,
        MXFP4_CASE,
        hidden_size=64,
        eos_token_id=2,
        quantization_config={"quant_method": "mxfp4"},
    )
    published.write_tokenizer(directory)
    rng, written, meaning = np.random.default_rng(0), {}, {}
    for name, tensor in tensors.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            written[name] = tensor.astype(ml_dtypes.bfloat16)
            meaning[name] = written[name].astype(np.float32)
            continue
        experts, columns, rows = tensor.shape
        blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16), np.uint8)
        # The largest magnitude of each group is 6, as quantizers make it.
        blocks[..., 0] |= 7
        scales = rng.integers(118, 124, (experts, rows, columns // 32), np.uint8)
        written |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meaning[name] = mxfp4_by_loops(blocks, scales)
    write_tensors(directory, written)
    return meaning


def mxfp4_by_loops(blocks, scales):
    """Returns what matrices in MXFP4 stand for, transposed."""
    experts, rows, groups, _ = blocks.shape
    found = np.zeros((experts, groups * 32, rows), np.float32)
    for e, r, g, byte in np.ndindex(blocks.shape):
        scale = 2.0 ** (int(scales[e, r, g]) - 127)
        for half, code in enumerate((blocks[e, r, g, byte] & 15, blocks[e, r, g, byte] >> 4)):
            found[e, g * 32 + byte * 2 + half, r] = FP4[code] * scale
    return found


def test_a_model_in_mxfp4_is_imported_and_exported_in_bfloat16(tmp_path):
    meaning = write_mxfp4(tmp_path / "model")
    gshard.import_model(tmp_path / "model", tmp_path / "run", length=16)
    gshard.load(tmp_path / "run").export(tmp_path / "out", "huggingface")
    found = read_headers(tmp_path / "out")
    assert found.keys() == meaning.keys()
    for name, expected in meaning.items():
        assert found[name].dtype == "BF16"
        np.testing.assert_array_equal(found[name].read().astype(np.float32), expected)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["model_type"] == "gpt_oss"
    gshard.import_model(tmp_path / "out", tmp_path / "again", length=16)


def test_parts_of_matrices_in_mxfp4_are_those_of_the_whole(tmp_path):
    meaning = write_mxfp4(tmp_path / "model")
    raw = read_headers(tmp_path / "model")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensor = packed.unpack(raw, {"quant_method": "mxfp4"}, "c")[name]
    assert tensor.shape == meaning[name].shape
    for box in ([(1, 3), (0, 64), (5, 9)], [(0, 4), (20, 50), (0, 128)]):
        part, _ = tensor.read_box(box)
        expected = meaning[name][tuple(slice(*span) for span in box)]
        np.testing.assert_array_equal(part, expected)


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}


def write_nvfp4(directory, packing):
    """Writes a Llama whose matrices but the embeddings are in NVFP4; returns name -> float32."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    tensors = published.write(directory, sizes=sizes, quantization_config=packing)
    rng, written, meaning = np.random.default_rng(0), {}, {}
    for name, tensor in tensors.items():
        if "_proj" not in name:
            written[name] = tensor.astype(ml_dtypes.bfloat16)
            meaning[name] = written[name].astype(np.float32)
            continue
        rows, columns = tensor.shape
        values = rng.integers(0, 256, (rows, columns // 2), np.uint8)
        values[:, ::8] |= 7
        scales = rng.uniform(1, 448, (rows, columns // 16)).astype(ml_dtypes.float8_e4m3fn)
        base, one = name.removesuffix("weight"), np.array([rng.uniform(1e-5, 1e-4)], np.float32)
        if packing is MODELOPT:
            written |= {name: values, f"{base}weight_scale_2": one.reshape(())}
            written |= {f"{base}input_scale": one.reshape(()), f"{base}k_scale": one.reshape(())}
        else:
            written |= {f"{base}weight_packed": values, f"{base}input_global_scale": one}
            one = np.float32(1) / one
            written[f"{base}weight_global_scale"] = one
        written[f"{base}weight_scale"] = scales
        meaning[name] = nvfp4_by_loops(values, scales, one[0], packing is COMPRESSED)
    write_tensors(directory, written)
    return meaning


def nvfp4_by_loops(values, scales, one, divides):
    """Returns what a matrix in NVFP4 stands for."""
    found = np.zeros((values.shape[0], 2 * values.shape[1]), np.float32)
    for row, column in np.ndindex(found.shape):
        byte = int(values[row, column // 2])
        scale = np.float32(scales[row, column // 16])
        scale = scale / one if divides else scale * one
        found[row, column] = np.float32(FP4[byte >> 4 if column % 2 else byte & 15]) * scale
    return found


@pytest.mark.parametrize("packing", [MODELOPT, COMPRESSED], ids=["modelopt", "compressed"])
def test_a_model_in_nvfp4_is_imported_and_exported_in_bfloat16(packing, tmp_path):
    meaning = write_nvfp4(tmp_path / "model", packing)
    params = gshard.open_model(tmp_path / "model" / "config.json", length=16)
    tensors = PublishedModel.open(tmp_path / "model", params).tensors
    assert tensors.keys() == meaning.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.read().astype(np.float32), meaning[name])
    tensor = tensors["model.layers.0.mlp.down_proj.weight"]
    for box in ([(0, 32), (0, 48)], [(3, 9), (2, 7)], [(4, 8), (15, 33)], [(31, 32), (47, 48)]):
        expected = meaning[tensor.name][tuple(slice(*span) for span in box)]
        np.testing.assert_array_equal(tensor.read_box(box)[0], expected)
    gshard.import_model(tmp_path / "model", tmp_path / "run", length=16)
    gshard.load(tmp_path / "run").export(tmp_path / "out", "huggingface")
    found = read_headers(tmp_path / "out")
    assert found.keys() == meaning.keys()
    for name, expected in meaning.items():
        narrow = expected.astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(found[name].read(), narrow, err_msg=name)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config


def test_nvfp4_without_its_scales_is_refused(tmp_path):
    write_nvfp4(tmp_path / "model", MODELOPT)
    raw = {name: tensor.read() for name, tensor in read_headers(tmp_path / "model").items()}
    base = "model.layers.0.mlp.up_proj"
    for change in (
        {f"{base}.weight_scale": raw[f"{base}.weight_scale"][:, 1:]},
        {f"{base}.weight_scale_2": np.ones(3, np.float32)},
    ):
        write_tensors(tmp_path / "model", raw | change)
        with pytest.raises(ValueError, match=rf"{base}.weight_scale of the shape \(48, 2\) in F8"):
            gshard.import_model(tmp_path / "model", tmp_path / "run", length=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, r"quant_method='modelopt' \(FP8\) of"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            r"'compressed-tensors' \(pack-quantized\) of the quantization_config; 'fp8', 'mxfp4'",
        ),
        ({"quant_method": "awq"}, "packed by quant_method='awq' of the quantization_config; 'fp8'"),
        ({"weight_block_size": [4]}, r"weight_block_size of the quantization_config is \[4\]; two"),
        (
            {"weight_block_size": None},
            r"have the shape \(2, 4\); the shape \(\) was expected",
        ),
        ({"fmt": "e5m2"}, "fmt of the quantization_config is 'e5m2', which is not supported"),
        (
            {"weight_block_size": [2, 2]},
            r"have the shape \(2, 4\); the shape \(4, 6\) was expected",
        ),
    ],
)
def test_other_packings_are_refused(change, message, tmp_path):
    write_fp8(tmp_path / "model", **change)
    with pytest.raises(ValueError, match=message):
        gshard.import_model(tmp_path / "model", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_matrix_in_fp8_without_scales_is_refused(tmp_path):
    write_fp8(tmp_path / "model")
    name = "model.layers.0.mlp.up_proj.weight"
    raw = read_headers(tmp_path / "model")
    kept = {key: value.read() for key, value in raw.items() if key != f"{name}_scale_inv"}
    write_tensors(tmp_path / "model", kept)
    with pytest.raises(ValueError, match=f"the scales of {name}, {name}_scale_inv, are missing"):
        gshard.import_model(tmp_path / "model", tmp_path / "run")


def peer_weights(source, kind, target, package="transformers"):
    """Returns name -> weight of a packed model that another package unpacked."""
    python = find_python(os.environ.get("PEERS_PYTHON"), ("torch", package))
    if not python:
        pytest.skip(f"{package} is not installed, and PEERS_PYTHON names no Python with it")
    command = [python, "-c", PEERS[kind], str(source), str(target)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    return dict(np.load(target))


@pytest.mark.slow
def test_transformers_makes_the_same_of_fp8(tmp_path):
    # It wants whole blocks.
    write_fp8(tmp_path / "model", weight_block_size=[4, 4])
    raw = {name: tensor.read() for name, tensor in read_headers(tmp_path / "model").items()}
    for name in [name for name in raw if "_proj" in name and not name.endswith("_inv")]:
        values = raw[name].astype(np.float32)
        raw[name], raw[f"{name}_scale_inv"], _ = pack_by_loops(values, (4, 4))
    write_tensors(tmp_path / "model", raw)
    theirs = peer_weights(tmp_path / "model", "fp8", tmp_path / "theirs.npz")
    check_same(tmp_path / "model", theirs)


@pytest.mark.slow
def test_transformers_makes_the_same_of_mxfp4(tmp_path):
    write_mxfp4(tmp_path / "model")
    theirs = peer_weights(tmp_path / "model", "mxfp4", tmp_path / "theirs.npz")
    check_same(tmp_path / "model", theirs)


@pytest.mark.slow
def test_compressed_tensors_makes_the_same_of_nvfp4(tmp_path):
    write_nvfp4(tmp_path / "model", COMPRESSED)
    source, target = tmp_path / "model", tmp_path / "theirs.npz"
    theirs = peer_weights(source, "nvfp4", target, "compressed_tensors")
    params = gshard.open_model(source / "config.json", length=16)
    tensors = PublishedModel.open(source, params).tensors
    assert sum("_proj" in name for name in theirs) > 10
    for name, expected in theirs.items():
        np.testing.assert_array_equal(tensors[name].read().astype(np.float32), expected)


def check_same(directory, theirs):
    """Checks that each tensor of a packed model is that of transformers, in every bit."""
    params = gshard.open_model(directory / "config.json", length=16)
    tensors = PublishedModel.open(directory, params).tensors
    assert tensors.keys() == theirs.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(tensor.read().astype(np.float32), theirs[name], err_msg=name)
