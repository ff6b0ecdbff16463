# tests: wings/planning/search/candidates.py, wings/planning/search/choices.py
"""Checks that a candidate's flags shard every layer as the cost model assumed."""

import functools

import hypothesis
import pytest
from hypothesis import strategies as st

from lingvo_gshard.core.config import registry
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.wings.gin.binding import apply_gin
from lingvo_gshard.wings.planning.search import candidates, search
from lingvo_gshard.wings.planning.search.candidates import candidate, group, patterns
from lingvo_gshard.wings.planning.search.choices import SAVE_ALL, Candidate, ChoicePaths
from lingvo_gshard.wings.planning.search.tracing import trace
from tests.planning.search.search_rates import batch
from tests.runtime import tiny_translation

SIZES = ((8,), (4, 2), (2, 2, 2))


@functools.cache
def traced():
    return trace(tiny_translation.trainer(), batch(8, 12))


@functools.cache
def layer_paths():
    return tiny_translation.trainer().task.layer_paths()


@functools.cache
def layer_groups():
    return group(traced())


@functools.cache
def paths() -> tuple[str, ...]:
    return tuple(spec.path.rpartition(".")[0] for spec in traced().weights)


def parts(mesh: Mesh, split) -> tuple:
    """Returns a split as indices of mesh axes, so that axis names do not matter."""
    return tuple(tuple(mesh.names.index(axis) for axis in axes) for axes in split)


@hypothesis.given(st.sampled_from(SIZES), st.data())
def test_flags_shard_every_layer_as_chosen(sizes, data):
    mesh = search.unnamed_mesh(sizes)
    chosen = [
        data.draw(st.sampled_from(candidates.sharding_options(mesh, g.letters)))
        for g in layer_groups().groups
    ]
    found = candidate(layer_groups(), chosen, mesh, SAVE_ALL, traced())
    partitioning = Partitioning.make(found.mesh, found.strategy, dict(found.overrides))
    partitioning.check_overrides(layer_paths())
    for own, option in zip(layer_groups().groups, chosen, strict=True):
        expected = Partitioning(mesh, option.strategy(mesh))
        for einsum in own.einsums:
            if einsum.path not in own.paths:
                continue
            for tensor in (*einsum.operands, einsum.result):
                kind = "weights" if tensor.is_weight else "activations"
                arguments = tensor.layout, kind, einsum.path, tensor.unsplit
                assert parts(partitioning.mesh, partitioning.split(*arguments)) == parts(
                    mesh, expected.split(*arguments)
                ), (found, arguments)
        for spec in own.weights:
            if spec.path.rpartition(".")[0] in own.paths:
                for kind in ("weights", "moments"):
                    assert parts(partitioning.mesh, partitioning.spec_split(spec, kind)) == parts(
                        mesh, expected.spec_split(spec, kind)
                    ), (found, spec.path, kind)


def test_override_patterns_are_as_general_as_possible():
    paths = ("a.layers[0].attention", "a.layers[1].attention", "a.layers[0].ff", "a.layers[1].ff")
    assert patterns(paths[:2], paths) == ["a.layers[*].attention"]
    moe = ("a.layers[1].ff", "a.layers[1].ff.router")
    assert patterns(moe, (*paths, *moe)) == ["a.layers[1].ff"]


def test_candidate_settings():
    found = Candidate("data=8", "B->data", (("a.b", "H->none"),), "full")
    assert found.settings(ChoicePaths(("task.encoder.execution.rematerialize",))) == [
        "mesh=data=8",
        "strategy=B->data",
        "sharding.overrides = {'a.b': 'H->none'}",
        'task.encoder.execution.rematerialize = "full"',
    ]


def test_remat_policy_is_set_on_every_stack():
    params = registry.get("gshard_paper.moe_128e_12l")
    paths = ChoicePaths.of(params)
    assert sorted(paths.rematerialize) == [
        "task.decoder.execution.rematerialize",
        "task.encoder.execution.rematerialize",
    ]
    chosen = Candidate("data=8", "B->data", (("encoder", "H->none"),), "full").settings(paths)
    settings = [setting for setting in chosen if " = " in setting]
    applied = apply_gin(params, [], settings)
    assert applied.task.encoder.execution.rematerialize == "full"
    assert applied.sharding.overrides == {"encoder": "H->none"}


@pytest.mark.parametrize("devices", [1, 2, 8, 12, 512])
def test_mesh_shapes_multiply_to_the_number_of_devices(devices):
    found = search.mesh_shapes(devices)
    assert len(set(found)) == len(found)
    for sizes in found:
        assert Mesh(tuple(zip("abc", sizes, strict=False))).size == devices
        assert min(sizes) > 1


def test_mesh_axes_follow_torus_dimensions():
    assert (6, 2) in search.mesh_shapes(12) and (6, 2) not in search.mesh_shapes(12, (4, 3))
    assert (4, 3) in search.mesh_shapes(12, (4, 3))


def test_experts_may_be_folded_over_an_axis_of_heads():
    mesh = Mesh.parse("data=4,model=2")
    named = Partitioning.make(mesh, "folded_tensor")
    options = [
        Partitioning(mesh, option.strategy(mesh))
        for option in candidates.sharding_options(mesh, "BGSECMH")
    ]

    def splits(partitioning):
        pairs = [("BLM", "activations"), ("EGCM", "activations"), ("EMH", "weights")]
        return [partitioning.split(layout, kind) for layout, kind in pairs]

    assert splits(named) in [splits(option) for option in options]
