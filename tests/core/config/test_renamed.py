# tests: core/config/params_text.py, wings/earlier_versions/renames.py
"""Reads the params.txt of runs of earlier versions, as those versions wrote it."""

import importlib
import json
import pathlib
import re

from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.config import params_text, registry
from lingvo_gshard.core.config.params import Configurable
from lingvo_gshard.core.config.params_text import experiment_from_text
from lingvo_gshard.layers.attention.self_attention import SelfAttention
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.earlier_versions import renames
from lingvo_gshard.wings.gin.binding import apply_gin
from lingvo_gshard.wings.low_precision.fp8 import Fp8
from lingvo_gshard.wings.low_precision.loss_scale import LossScale
from lingvo_gshard.wings.published_layers.published_attention import PublishedAttention
from lingvo_gshard.wings.repeat.loop import Repeat


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


FOLDER = pathlib.Path(__file__).parent / "old"
OLD = sorted(FOLDER.glob("*.txt"))
# Experiment -> settings that it had then, and has with other values today.
_STACKS, _DROPOUTS = ("encoder", "decoder"), ("input", "residual")
EARLIER = {
    "translation.quickstart": [
        "run.steps = 3200",
        "step.optimizer = @lingvo_gshard.training.step.adam.Adam",
        "step.schedule.learning_rate = 0.004",
        *(f"task.{stack}.{of}_dropout_rate = 0.1" for stack in _STACKS for of in _DROPOUTS),
    ]
}
# Class -> its options, and their values by default.
OPTIONS = FOLDER / "options@2026-11-27.json"


class RenamedParamsTest(testing.TestCase, parameterized.TestCase):
    @parameterized.named_parameters((re.sub(r"\W", "_", path.stem), path) for path in OLD)
    def test_params_of_an_earlier_version_are_todays(self, path):
        """Expects the registered experiments to have the values that they had then."""
        read = experiment_from_text(path.read_text())
        name = path.stem.partition("@")[0]
        today = apply_gin(registry.get(name), [], EARLIER.get(name, []))
        self.assertEqual(read.to_text(), today.to_text())

    def test_every_option_of_an_earlier_version_is_read(self):
        """Expects each class to have the options that it had, or to read their usual values."""
        for cls, options in json.loads(OPTIONS.read_text()).items():
            with self.subTest(cls):
                old = [("a.cls", cls, 1), *((f"a.{name}", options[name], 1) for name in options)]
                (_, today, _), *lines = renames.lines_today(old)
                module, _, name = today.rpartition(".")
                params = getattr(importlib.import_module(module), name).params()
                found = {path.partition(".")[2] for path, *_ in lines}
                self.assertContainsSubset(found, dict(params.items()))

    def test_todays_params_are_read_as_they_are(self):
        params = registry.get("translation.quickstart")
        self.assertEqual(experiment_from_text(params.to_text()).to_text(), params.to_text())

    @parameterized.parameters(
        ("trainer.steps = 3", "run.steps"),
        ("trainer.clip_norm = 3.0", "step.clip_norm"),
        ("trainer.routers.every_steps = 3", "run.routers.every_steps"),
        ("trainer.optimizer.beta = 0.5", "step.optimizer.beta"),
    )
    def test_a_setting_with_an_old_name_is_refused_with_todays(self, old, new):
        with self.assertRaisesRegex(ValueError, f"Did you mean '{new}'"):
            apply_gin(registry.get("translation.quickstart"), [], [old])

    def test_every_class_with_a_new_module_is_found_there(self):
        """Expects gin files, which name classes as params.txt does, to find them too."""
        old = "lingvo_gshard.layers.stacks.repeat.Repeat"
        params = registry.get("translation.quickstart")
        params = apply_gin(params, [], [f"task.decoder.execution = @{old}"])
        self.assertIs(params.task.decoder.execution.cls, Repeat)
        for module in renames.TABLE.modules.values():
            importlib.import_module(f"lingvo_gshard.{module}")

    def test_classes_that_left_a_package_are_found(self):
        for old, today in renames.TABLE.classes.items():
            module, _, name = today.rpartition(".")
            found = getattr(importlib.import_module(f"lingvo_gshard.{module}"), name)
            self.assertEqual(
                params_text.class_today(f"lingvo_gshard.{old}").rpartition(".")[2], name
            )
            self.assertTrue(issubclass(found, Configurable))

    def test_a_layer_with_options_that_moved_is_of_the_class_that_has_them(self):
        """Expects a layer whose options have the usual values to stay of its class."""
        new = registry.get("translation.quickstart")
        decoder = new.task.decoder.layer
        decoder.self_attention = PublishedAttention.of(decoder.self_attention).set(chunk=16)
        old = new.to_text().replace(_name(PublishedAttention), _name(SelfAttention))
        for line in ("chunk : 0", "rotary_pairs : 'halves'", "value_scale : 1.0"):
            old += f"task.encoder.layer.self_attention.{line}\n"
        self.assertEqual(experiment_from_text(old).to_text(), new.to_text())

    def test_a_bound_that_dropped_rows_drops_them(self):
        new = registry.get("translation.quickstart")
        new.task.decoder.moe.dispatch = DroplessDispatch.params().set(bound=1.5, over_bound="drop")
        path = "task.decoder.moe.dispatch.over_bound"
        old = re.sub(rf"^{re.escape(path)} : .*\n", "", new.to_text(), flags=re.MULTILINE)
        assert old != new.to_text()
        self.assertEqual(experiment_from_text(old).to_text(), new.to_text())

    def test_classes_of_folders_that_are_wings_today_are_found(self):
        old = "lingvo_gshard.open_models.layers.Mine"
        self.assertEqual(
            params_text.class_today(old), "lingvo_gshard.wings.open_models.layers.Mine"
        )

    def test_a_class_that_left_its_module_is_found(self):
        text = registry.get("translation.quickstart").to_text()
        old = text.replace("wings.low_precision.fp8.Fp8", "training.step.precision.Fp8")
        assert old != text
        step = experiment_from_text(old).step
        self.assertIs(step.fp8.cls, Fp8)
        self.assertIs(step.loss_scale.cls, LossScale)


if __name__ == "__main__":
    testing.main()
