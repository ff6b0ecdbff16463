# tests: /benchmarks/parity/
"""python -m benchmarks parity --variants: what is drawn, and how outcomes are told apart."""

import json
import os
import pathlib
from typing import Any

import numpy as np
import pytest

from benchmarks import __main__ as benchmarks
from benchmarks.parity import variants
from benchmarks.parity.draw import Variant, draw
from benchmarks.parity.peer import LIBRARIES
from benchmarks.parity.peer_process import OUTPUTS
from benchmarks.peer_python import find_python
from lingvo_gshard.core import UserError
from lingvo_gshard.wings.open_models.families import FAMILIES

LLAMA = Variant("llama", {}, {"hidden_act": "gelu", "logit_scale": 3})


def test_a_seed_draws_the_same_variants():
    for family in FAMILIES:
        drawn = [draw(family, f"1 {number}") for number in range(20)]
        assert drawn == [draw(family, f"1 {number}") for number in range(20)]
        assert len({json.dumps(each.changes) for each in drawn}) > 15
        assert {each.family for each in drawn} == {family}


def test_keys_of_the_class_and_of_other_classes_are_drawn():
    drawn = [draw("mixtral", f"2 {number}") for number in range(600)]
    changed = {key for each in drawn for key in each.changes}
    own = FAMILIES["mixtral"].class_keys.keys()
    assert changed >= own - {"model_type"}
    assert {"encoder_ffn_dim", "hidden_size_per_layer_input"} < changed - own
    # A rope_scaling comes with its rope_theta, and no variant has it in both forms.
    assert all(not each.changes.keys() >= {"rope_scaling", "rope_parameters"} for each in drawn)
    assert max(len(each.changes.keys() - {"rope_theta"}) for each in drawn) == 3


class Peer:
    """Has the outputs of a model, and says whether another one differs."""

    def __init__(self, directory, has_effect):
        self.directory, self._has_effect, self.asked = directory, has_effect, []

    def differs(self, family, values):
        self.asked.append((family, values))
        return self._has_effect


@pytest.mark.parametrize(
    ("found", "has_effect", "outcome"),
    [
        (2.0, True, variants.EQUAL),
        (2.01, True, variants.DIFFERS),
        (np.nan, True, variants.DIFFERS),
        (UserError("hidden_act is 'gelu'"), True, variants.REFUSED),
        (UserError("hidden_act is 'gelu'"), False, variants.NEEDLESS),
        (UserError("the hidden_activation is unknown"), True, variants.NEEDLESS),
        (KeyError("hidden_act"), True, variants.CRASH),
    ],
)
def test_outcomes(found, has_effect, outcome, tmp_path, monkeypatch):
    ids, logits = np.zeros((1, 2), int), np.full((1, 2, 3), 2.0)
    np.savez(tmp_path / OUTPUTS, logits=logits, ids=ids)

    def ours(directory: pathlib.Path, ids: np.ndarray):
        assert directory == tmp_path
        if isinstance(found, Exception):
            raise found
        return np.full_like(logits, found)

    monkeypatch.setattr(variants, "_logits", ours)
    peer: Any = Peer(tmp_path, has_effect)
    row = variants.judge(peer, LLAMA, draws=3)
    assert (row.outcome, row.family, row.changes) == (outcome, "llama", LLAMA.changes)
    assert (row.outcome in variants.FAULTS) is (outcome not in (variants.EQUAL, variants.REFUSED))
    if "hidden_act " in row.message:
        # Without the key that the error names.
        assert peer.asked == [("llama", {"logit_scale": 3})]


@pytest.mark.slow
def test_variants_equal_transformers_or_are_refused(tmp_path):
    python = find_python(os.environ.get("PEERS_PYTHON"), LIBRARIES)
    if not python:
        pytest.skip("transformers is not installed, and PEERS_PYTHON names no Python with it")
    flags = [f"--peers_python={python}", "--variants=24", f"--json={tmp_path}/rows.json"]
    flags.append("--families=llama,qwen3_moe,gemma4_text,t5,kimi_k2,mellum")
    assert benchmarks.main(["benchmarks", "parity", *flags]) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert len(rows) == 24 and {row["outcome"] for row in rows} == {"equal", "refused"}
    assert sum(row["outcome"] == "equal" for row in rows) > 12
