# tests: wings/published_layers/gemma4_small.py, wings/published_layers/indexed_attention.py
# tests: wings/published_layers/latent_experts.py
"""Layers that share keys or choices, or have products of their own, decode with int8 weights."""

import pytest

from lingvo_gshard.wings.inference.decoding.precision import INT8_WEIGHTS
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.experiment import experiment_of
from tests.inference import tiny_engine
from tests.inference.test_precision import LIMIT, decode, engine_of, requests
from tests.open_models.over_meshes import test_gemma4_over_meshes, test_glm_over_meshes
from tests.open_models.over_meshes.test_hybrids_over_meshes import CONFIGS

MODELS = {
    "gemma": test_gemma4_over_meshes.SHARING,
    "glm": test_glm_over_meshes.CONFIG,
    "nemotron": CONFIGS["nemotron"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_decodes_nearly_as_the_trained_model(name):
    task = experiment_of(PublishedConfig(MODELS[name], "config.json"), length=12).task
    task = task.instantiate(path="task")
    model = tiny_engine.Model(task, task.init(1))
    asked = requests(tiny_engine.language_model, DecodingOptions(beam_size=1, most_tokens=LIMIT))
    with engine_of(model, INT8_WEIGHTS) as engine:
        found = [hypotheses[0] for hypotheses in decode(engine, asked)]
        assert {"int8", "float32"} <= {str(weight.dtype) for weight in engine.weights}
    gaps = []
    for request, best in zip(asked, found, strict=True):
        own = model.log_probabilities((), [request.given])[0]
        gaps.append(abs(best.log_probabilities[0] - own[best.tokens[0]]))
        assert own[best.tokens[0]] > own.max() - 0.1
    # Rounding shows, and is small.
    assert 0 < max(gaps) < 0.1
