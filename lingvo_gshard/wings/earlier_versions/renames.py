"""Names of earlier versions in Params, and what they are called today."""

from __future__ import annotations

from lingvo_gshard.core.config.params_text import RENAMES, Line, Renames

# Old options of the trainer that belong to the run today. The other old options of the trainer
# belong to the step.
_OF_THE_RUN = frozenset(
    (
        "steps",
        "log_every_steps",
        "checkpoint_every_steps",
        "evaluate_every_steps",
        "keep_checkpoints",
        "keep_best",
        "patience",
        "writers",
        "routers",
        "hang_factor",
        "hang_seconds",
        "save_seconds",
        "check_determinism_every",
    )
)
_TRAINER = "trainer"
_RUN_OPTIONS = "lingvo_gshard.training.run.options"
# Module of an earlier version -> the module that has its classes today, both in the package.
RENAMED_MODULES = {
    "core.config.experiment": "core.config.registry",
    "data.cleaning.base": "wings.preparation.cleaning.cleaner",
    "data.cleaning.documents": "wings.preparation.cleaning.leaks",
    "data.preparation.preparation": "wings.preparation.preparation",
    "data.batching.mixture_plan": "wings.preparation.mixing",
    "data.prepared.mixture_plan": "wings.preparation.mixing",
    "data.prepared.planning.shares": "wings.preparation.mixing",
    "data.published_inputs": "wings.preparation.published_inputs",
    "data.published_text_input": "wings.preparation.published_inputs",
    "data.published_translation_input": "wings.preparation.published_inputs",
    "data.vocabularies.vocabulary_trainer": "wings.preparation.vocabularies.vocabulary_trainer",
    "data.vocabulary_trainer": "wings.preparation.vocabularies.vocabulary_trainer",
    "layers.lora": "wings.fine_tuning.lora",
    "layers.attention.latent.latent_attention": "wings.published_layers.latent_attention",
    "layers.attention.positions.rotary_scaling": "wings.published_layers.rotary_scaling",
    "layers.attention.positions.shared_relative_bias": "layers.attention.relative_bias",
    "layers.moe.dispatches.dropless": "wings.dropless.dispatch",
    "layers.moe.dispatches.buffers": "layers.moe.dispatches.dispatch",
    "layers.moe.routers.switch": "layers.moe.routers.top_k",
    "layers.stacks.pipeline": "wings.pipeline.pipeline",
    "layers.stacks.loop": "wings.repeat.loop",
    "layers.stacks.repeat": "wings.repeat.loop",
    "layers.stacks.sequential": "layers.stacks.execution",
    "tasks.preferences": "wings.fine_tuning.preferences",
    "tasks.future_token": "tasks.token_task",
    "training.local_updates": "wings.optimizers.local_updates",
    "training.loss_scale": "wings.low_precision.loss_scale",
    "training.monitoring.routers.settings": "wings.services.run_options",
    "training.spikes.rule": "wings.optimizers.spikes",
    "training.step.loss_scale": "wings.low_precision.loss_scale",
    "training.trainer": "training.step.trainer",
    **{
        f"layers.attention.{name}": f"wings.published_layers.{name}"
        for name in ("gated_delta_net", "indexed_attention", "latent_attention")
    },
    **{f"layers.attention.{name}": f"wings.long_inputs.{name}" for name in ("blockwise", "ring")},
    **{
        f"layers.moe.routers.{name}": f"wings.published_layers.routers.{name}"
        for name in (
            *("expert_choice", "forced_balance", "hashed"),
            *("sigmoid", "sinkhorn", "sparse_mixer"),
        )
    },
    **{
        f"data.cleaning.{name}": f"wings.preparation.cleaning.{name}"
        for name in ("cleaner", "leaks", "near_duplicates")
    },
    **{
        f"data.streamed.{name}": f"wings.preparation.streamed.{name}"
        for name in ("examples", "inputs")
    },
    **{
        f"data.prepared.{name}": f"wings.preparation.prepared.{name}"
        for name in ("base_input", "language_model_input", "translation_input")
    },
    **{
        f"data.conversations.{name}": f"wings.fine_tuning.conversations.{name}"
        for name in ("conversation_input", "preference_input", "reader")
    },
    **{
        f"data.sources.{name}": f"wings.preparation.formats.{name}"
        for name in ("gettext", "keyed", "moses", "qt", "quoted", "units")
    },
    **{
        f"training.optim.{name}": f"training.step.{name}"
        for name in ("adafactor", "adam", "optimizer", "schedules")
    },
    **{f"training.optim.{name}": f"wings.optimizers.{name}" for name in ("lion", "momentum")},
    **{
        f"training.step.{name}": f"wings.optimizers.{name}"
        for name in ("lion", "local_updates", "momentum", "muon", "spikes")
    },
}
# Class of an earlier version -> the class today, where its module has other classes still.
RENAMED_CLASSES = {
    "layers.attention.positions.rotary_scaling.RotaryScaling": (
        "layers.attention.rotary.RotaryScaling"
    ),
    **{
        f"layers.attention.rotary.{name}Scaling": (
            f"wings.published_layers.rotary_scaling.{name}Scaling"
        )
        for name in ("AlphaNTK", "DynamicNTK", "Linear", "Llama3", "LongRope", "Yarn")
    },
    **{
        f"layers.norm.Heads{name}Norm": f"wings.published_layers.heads_norms.Heads{name}Norm"
        for name in ("Layer", "RMS")
    },
    "training.run.options.Routers": "wings.services.run_options.Routers",
    "training.step.precision.Fp8": "wings.low_precision.fp8.Fp8",
    "training.step.precision.LossScale": "wings.low_precision.loss_scale.LossScale",
    **{
        f"{package}.{name}Router": f"wings.published_layers.routers.{name}Router"
        for package in ("layers.moe", "layers.moe.routers")
        for name in (
            *("BiasedSoftmax", "ExpertChoice", "ForcedBalance", "Hash"),
            *("Sigmoid", "Sinkhorn", "SparseMixer"),
        )
    },
    **{
        f"{package}.DroplessDispatch": "wings.dropless.dispatch.DroplessDispatch"
        for package in ("layers.moe", "layers.moe.dispatches")
    },
}
# Class of an earlier version -> the class that has options that it had, and the values that these
# options have in a class without them.
_MOVED_OPTIONS: dict[str, tuple[str, dict[str, str]]] = {
    "layers.attention.self_attention.SelfAttention": (
        "wings.published_layers.published_attention.PublishedAttention",
        {
            "chunk": "0",
            "has_output_gate": "False",
            "normalizes_rotated": "False",
            "rotary_pairs": "'halves'",
            "temperature_floor": "0",
            "temperature_scale": "0.1",
            "value_dim": "0",
            "value_scale": "1.0",
        },
    ),
    "layers.attention.cross_attention.CrossAttention": (
        "layers.attention.cross_attention.CrossAttention",
        {"value_dim": "0"},
    ),
    "layers.moe.routers.top_k.TopKRouter": (
        "wings.published_layers.routers.group_limited.GroupLimitedRouter",
        {"expert_groups": "0", "groups_per_token": "0", "scores_per_group": "1"},
    ),
}
# Folders of an earlier version that stand in wings/ today.
_IN_WINGS = ("export", "hlo", "inference", "kernels", "open_models", "planning", "profiling")
_PACKAGE = "lingvo_gshard."


def path_today(path: str) -> str:
    """Returns today's name for a path of Params of an earlier version."""
    first, _, rest = path.partition(".")
    if first != _TRAINER or not rest:
        return path
    name = rest.partition(".")[0]
    return f"{'run' if name in _OF_THE_RUN else 'step'}.{rest}"


def lines_today(lines: list[Line]) -> list[Line]:
    """Returns lines of a params.txt with today's names.

    Args:
      lines: (path, value, number of the line).
    """
    found = [(path_today(path), class_today(value), number) for path, value, number in lines]
    found = _with_dropped_rows(_without_moved_options(found))
    is_old = any(path == f"{_TRAINER}.cls" for path, _, _ in lines)
    return [*found, ("run.cls", f"{_RUN_OPTIONS}.RunOptions", 0)] if is_old else found


def _without_moved_options(lines: list[Line]) -> list[Line]:
    """Returns lines without the options that left a class, or with the class that has them."""
    values = {path: value for path, value, _ in lines}
    classes: dict[str, str] = {}
    left_out: set[str] = set()
    for path, value in values.items():
        own = value.removeprefix(_PACKAGE)
        if not path.endswith(".cls") or own not in _MOVED_OPTIONS:
            continue
        cls, usual = _MOVED_OPTIONS[own]
        options = {f"{path.removesuffix('cls')}{name}": usual[name] for name in usual}
        if all(values.get(option, default) == default for option, default in options.items()):
            left_out.update(options)
        else:
            classes[path] = f"{_PACKAGE}{cls}"
    return [(path, classes.get(path, v), n) for path, v, n in lines if path not in left_out]


def _with_dropped_rows(lines: list[Line]) -> list[Line]:
    """Returns lines whose bounds of dropless dispatch drop rows, as all bounds did once."""
    known = {path for path, _, _ in lines}
    found = list(lines)
    for path, value, number in lines:
        choice = f"{path.removesuffix('bound')}over_bound"
        if path.endswith(".dispatch.bound") and float(value) and choice not in known:
            found.append((choice, "'drop'", number))
    return found


def last_path(text: str) -> str | None:
    """Returns the path that the last line of an earlier version's params.txt has.

    None for a text of today's version.
    """
    return f"{_TRAINER}.writers" if f"\n{_TRAINER}." in text else None


def class_today(name: str) -> str:
    """Returns today's dotted name for a class of an earlier version; other names as they are."""
    own = name.removeprefix(_PACKAGE)
    module, _, attribute = own.rpartition(".")
    if name.startswith(_PACKAGE) and own in RENAMED_CLASSES:
        return f"{_PACKAGE}{RENAMED_CLASSES[own]}"
    if name.startswith(_PACKAGE) and own.partition(".")[0] in _IN_WINGS:
        return f"{_PACKAGE}wings.{own}"
    if not name.startswith(_PACKAGE) or module not in RENAMED_MODULES:
        return name
    return f"{_PACKAGE}{RENAMED_MODULES[module]}.{attribute}"


RENAMES.register("earlier_versions")(Renames(path_today, class_today, lines_today, last_path))
