"""Setting: a key of `config.json` that is a hyperparameter, read and written by one row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.open_models.config import PublishedConfig
from lingvo_gshard.open_models.families.family import rotating


@dataclasses.dataclass(frozen=True)
class Setting:
    """A key whose value is a hyperparameter as it is.

    Attributes:
      key: the key.
      paths: paths of the hyperparameters within the task. `attention` stands for the
        self-attention of the decoder's layers.
      null: the value that null stands for. None: the key must have a value.
      kind: type of a value that is no whole number above 0, if the key must have one.
    """

    key: str
    paths: tuple[str, ...]
    null: Any = None
    kind: type | None = None

    def read(self, config: PublishedConfig, task: Params) -> None:
        """Sets the hyperparameters of a task whose layers all have one self-attention."""
        if self.null is None:
            value = config.get(self.key, kind=self.kind)
        else:
            value = config.get(self.key, self.null)
        for path in self.paths:
            task.set_path(path.replace("attention.", "decoder.layer.self_attention."), value)

    def value(self, task: Params) -> Any:
        """Returns the value of the key, from the Params of a task."""
        root, _, name = self.paths[0].rpartition(".")
        owner = rotating(task.decoder) if root == "attention" else task
        return owner.get(name if root == "attention" else self.paths[0])


def read_settings(config: PublishedConfig, task: Params, settings: Iterable[Setting]) -> None:
    """Sets the hyperparameters of a task that keys of a config are."""
    for setting in settings:
        setting.read(config, task)


def settings_config(task: Params, settings: Iterable[Setting]) -> dict[str, Any]:
    """Returns the keys and values of settings, from the Params of a task."""
    return {setting.key: setting.value(task) for setting in settings}


# Keys of many families.
BIASES = Setting("attention_bias", ("attention.use_bias", "attention.use_output_bias"), False)
FEED_FORWARD_BIAS = Setting("mlp_bias", ("decoder.layer.feed_forward.use_bias",), False)
JITTER = Setting("router_jitter_noise", ("decoder.moe.router.jitter",), 0.0)
