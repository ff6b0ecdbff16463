# tests: wings/open_models/exporting.py
"""Tests what is said of models that no published family describes."""

import pytest

from lingvo_gshard.params import translation
from lingvo_gshard.wings.open_models import exporting
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families import FAMILIES
from tests.open_models.translation import models


def test_the_quickstart_is_nearest_to_nllb_moe():
    task = translation.quickstart().task
    task.set(source_vocabulary_size=4000, target_vocabulary_size=4000)
    found = exporting.why_none_fits(task)
    assert found.startswith("the nearest is NllbMoeForConditionalGeneration, but task.decoder.")
    for part in (
        "task.decoder.layer.norm.epsilon and task.encoder.layer.norm.epsilon are 1e-06, there",
        "task.decoder.moe.router.cls and task.encoder.moe.router.cls are Top2Router, there TopKRou",
        "task.positions.reaches_base is False, there True",
    ):
        assert part in found
    assert "execution" not in found and "encoder.layer.cross_attention" not in found


def test_what_training_changes_is_no_difference():
    case = models.case_of("nllb-moe, experts in every second and fourth layer")
    config = PublishedConfig({"model_type": case.model_type, **case.values}, "config.json")
    family = FAMILIES[case.model_type]
    task = family.task_of(config)
    task.encoder.residual_dropout_rate = 0.3
    task.decoder.token_dropout_rate = 0.1
    task.label_smoothing = 0.2
    task.decoder.execution.rematerialize = "full"
    exporting.check_same_task(task, family, config)
    task.encoder.moe.router.k = 1
    with pytest.raises(ValueError, match=r"NllbMoe.* model: task\.encoder\.moe\.router\.k is 1, t"):
        exporting.check_same_task(task, family, config)
