# tests: params/language_model.py, wings/giants/experiments.py
"""Tests the language modeling experiments: their sizes and documented commands."""

import math
import re
import shlex

import pytest

from lingvo_gshard.core.config import registry
from lingvo_gshard.core.config.params_text import experiment_from_text
from lingvo_gshard.data.sources.text import TextReader
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.tools.flags.plain_flags import as_settings
from lingvo_gshard.training.step.adafactor import Adafactor
from lingvo_gshard.wings.facts.parameters import active_parameters
from lingvo_gshard.wings.gin.binding import apply_gin
from lingvo_gshard.wings.planning.machines import topologies
from lingvo_gshard.wings.published_layers.latent_attention import LatentAttention
from tests.layers.stacks.executions import loop

BILLION = 10**9
TO_TRAIN = ("from_files", "quickstart")
ONE_GPU = ("one_gpu_dense", "one_gpu_experts")
# Devices, tokens per batch, and billions of total and active parameters.
PUBLISHED = {
    "deepseek_v3_like": (1024, 15_360 * 4096, 671, 37),
    "glam_64b_64e": (1024, 1024 * 1024, 1162, 96.6),
    "gpt3_175b": (512, 1536 * 2048, 175, 175),
}


def params_of(name):
    return registry.get(f"language_model.{name}")


def trainer_of(name):
    """Returns the full-size trainer, with the vocabulary size of the input."""
    params = params_of(name)
    params.task.vocabulary_size = params.input.vocabulary.size
    return params.step.instantiate(params.task, params.run.steps)


def size(specs):
    return sum(math.prod(spec.shape) for spec in specs)


def commands(name, program):
    text = registry.describe(f"language_model.{name}").replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(rf"^ +({program} .*)$", text, re.MULTILINE)]


def test_all_experiments_are_registered():
    found = [name for name in registry.names() if name.startswith("language_model.")]
    assert found == sorted(f"language_model.{name}" for name in (*TO_TRAIN, *ONE_GPU, *PUBLISHED))


@pytest.mark.parametrize("name", [*TO_TRAIN, *ONE_GPU, *PUBLISHED])
def test_params_round_trip_through_text(name):
    assert not params_of(name).diff(experiment_from_text(params_of(name).to_text()))


@pytest.mark.parametrize("name", TO_TRAIN)
def test_docstrings_show_the_training_command(name):
    text = registry.describe(f"language_model.{name}")
    assert all(word in text for word in ("Purpose:", "Time:", "Result:"))
    for command in commands(name, "gshard-train"):
        assert f"--experiment=language_model.{name}" in command
        flags = [flag for flag in as_settings(command) if flag.startswith("--gin_param=")]
        settings = [flag.removeprefix("--gin_param=") for flag in flags]
        params = apply_gin(params_of(name), [], settings)
        params.input.instantiate()
        assert (params.input.corpus.cls is TextReader) == (name == "from_files")
    assert commands(name, "gshard-train")
    task = trainer_of(name).task
    kinds = [type(layer.feed_forward) is MixtureOfExperts for layer in task.decoder.layers]
    assert kinds == [False, True, False, True]
    moe = task.p.decoder.moe
    assert moe.router.evaluation_capacity_factor == moe.num_experts


@pytest.mark.parametrize(
    ("name", "published"), [("one_gpu_dense", 202.4e6), ("one_gpu_experts", 1452.3e6 / 4)]
)
def test_layers_for_one_gpu_have_the_published_widths(name, published):
    """A layer of Llama 2 7B has 202 million weights; Mixtral's, half as wide, a fourth of its."""
    params = params_of(name)
    params.task.vocabulary_size = params.input.vocabulary.size
    sizes = []
    for layers in (1, 2):
        params.task.decoder.num_layers = layers
        sizes.append(
            size(params.step.instantiate(params.task, params.run.steps).theta_specs.flatten())
        )
    assert sizes[1] - sizes[0] == pytest.approx(published, rel=0.003)
    (command,) = commands(name, "gshard-bench fill")
    assert f"--experiment=language_model.{name}" in command
    assert params.step.precision == "bfloat16"


def test_missing_files_raise_with_the_option():
    with pytest.raises(ValueError, match="input.corpus.train of the TextReader names no file"):
        params_of("from_files").input.instantiate()


@pytest.mark.parametrize("name", PUBLISHED)
def test_large_models_fit_their_machine(name):
    devices, tokens, _, _ = PUBLISHED[name]
    params = params_of(name)
    (command,) = commands(name, "gshard-plan")
    _, experiment, topology = command
    assert experiment == f"--experiment=language_model.{name}"
    assert topologies.get(topology.removeprefix("--topology=")).devices == devices
    assert Mesh.parse(params.sharding.mesh).size == devices
    assert Partitioning.make(params.sharding.mesh, params.sharding.strategy).unused_axes == ()
    rows, length = params.input.cls.batch_specs(params.input)["target_labels"].shape
    assert rows * length == tokens
    part = Mesh.parse(params.sharding.mesh).axis_size("data") * params.step.micro_batches
    assert rows % part == 0
    assert params.step.precision == "bfloat16"
    policy = "exchanges" if params.task.decoder.moe_every else "full"
    assert params.task.decoder.execution == loop(policy)


@pytest.mark.parametrize("name", ["glam_64b_64e", "gpt3_175b"])
def test_parameter_counts_equal_the_published_ones(name):
    """Compares the published digits."""
    _, _, published, active = PUBLISHED[name]
    trainer = trainer_of(name)
    assert round(size(trainer.theta_specs.flatten()) / BILLION) == published
    found = active_parameters(trainer.task) / BILLION
    assert found == pytest.approx(active, rel=0.003)


def test_deepseek_differs_only_by_its_attention():
    """With latent attention instead of grouped heads it would have the published 671 billion.

    Its matrices follow arXiv 2412.19437, equations 1 to 11 and section 4.2. Queries are projected
    to 1536 and up to 128 heads of 128 + 64. Keys and values are projected to 512, plus 64 of the
    key shared by all heads, and up to 128 heads of 128 + 128. The last is the output projection.
    """
    latent = 7168 * 1536 + 1536 * 128 * (128 + 64)
    latent += 7168 * (512 + 64) + 512 * 128 * (128 + 128) + 128 * 128 * 7168
    trainer = trainer_of("deepseek_v3_like")
    weights = trainer.theta_specs.flatten()
    attention = size(spec for spec in weights if ".self_attention." in spec.path)
    assert attention == 61 * 2 * 7168 * 128 * (128 + 8)
    change = 61 * latent - attention
    assert round((size(weights) + change) / BILLION) == 671
    assert round((active_parameters(trainer.task) + change) / BILLION, 1) == 37.6


def test_deepseek_with_latent_attention_has_the_published_weights():
    """Counts the weights of DeepSeek-V3's layers themselves, without and with token prediction.

    The README_WEIGHTS.md of https://github.com/deepseek-ai/DeepSeek-V3 has 671 billion, and 11.5
    billion that only the module of multi-token prediction has.
    """
    task = params_of("deepseek_v3_like").task
    task.set(vocabulary_size=129_280, future_tokens=1)
    task.decoder.layer.self_attention = LatentAttention.params().set(
        query_rank=1536, key_value_rank=512, plain_dim=128, rotary_dim=64, value_dim=128
    )
    weights = task.instantiate().variable_specs().flatten()
    future = size(spec for spec in weights if spec.path.startswith("future"))
    assert size(weights) - future == 671_026_419_200
    assert future / BILLION == pytest.approx(11.5, rel=0.02)


def test_dimensions_are_those_published():
    sizes = {
        "gpt3_175b": ({"M": 12288, "H": 49152, "N": 96, "D": 128, "V": 50_257}, 96, 0),
        "glam_64b_64e": ({"M": 8192, "H": 32768, "N": 128, "D": 128, "E": 64}, 64, 32),
        "deepseek_v3_like": ({"M": 7168, "E": 256, "D": 128, "V": 129_280}, 61, 58),
    }
    for name, (lengths, layers, mixtures) in sizes.items():
        task = trainer_of(name).task
        for spec in task.variable_specs().flatten():
            for letter, length in zip(spec.layout, spec.shape, strict=True):
                assert length == lengths.get(letter, length), spec
        found = task.decoder.layer_counts()
        assert sum(times for _, times in found) == layers
        with_experts = [
            (layer, times) for layer, times in found if type(layer.feed_forward) is MixtureOfExperts
        ]
        assert sum(times for _, times in with_experts) == mixtures
    assert [layer.feed_forward.p.hidden_dim for layer, _ in found] == [18432] * 3 + [2048]
    router = found[-1][0].feed_forward.router.p
    assert (router.k, router.expert_groups, router.groups_per_token) == (8, 8, 4)


def test_glam_uses_adafactor_without_a_first_moment():
    trainer = trainer_of("glam_64b_64e")
    assert trainer.p.optimizer.cls is Adafactor
    moments = trainer.state_specs().moments.flatten_items()
    names = {path.rsplit(".", 1)[-1] for path, _ in moments}
    assert names == {"row_moment", "column_moment", "second_moment"}
