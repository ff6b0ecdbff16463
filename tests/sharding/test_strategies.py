"""Tests base strategies, their unions, tables, and error messages."""

import itertools

import hypothesis
import hypothesis.strategies as st
import pytest

from lingvo_gshard.core.letters import LETTERS
from lingvo_gshard.sharding import strategies
from lingvo_gshard.sharding.mesh import Mesh
from lingvo_gshard.sharding.strategies import Strategy

FLAT = Mesh.parse("data=8")
SQUARE = Mesh.parse("data=4,model=2")
CUBE = Mesh.parse("data=2,fsdp=2,model=2")

HNV = {"H": ("model",), "N": ("model",), "V": ("model",)}
BG = {"B": ("data",), "G": ("data",)}
BGE = {**BG, "E": ("data",)}
BATCH_OF_CUBE = {"B": ("fsdp", "data"), "G": ("fsdp", "data")}

# (activations, weights, moments) of each base strategy.
BASES = {
    "replicated": ({}, {}, {}),
    "data": (BG, {}, {}),
    "expert": (BGE, {"E": ("data",)}, {"E": ("data",)}),
    "tensor": (HNV, HNV, HNV),
    "fsdp": (BG, {"M": ("data",), "*": ("data",)}, {"M": ("data",), "*": ("data",)}),
    "zero1": (BG, {}, {"M": ("data",), "*": ("data",)}),
    "sequence": ({"L": ("model",)}, {}, {}),
}
CONTEXT = Mesh.parse("data=2,context=2,model=2")


def tables(strategy: Strategy) -> tuple[dict, dict, dict]:
    return strategy.activations, strategy.weights, strategy.moments


@pytest.mark.parametrize("name", BASES)
def test_tables_of_base_strategies(name):
    assert set(strategies.base_names()) == {*BASES, "context", "pipeline"}
    assert tables(strategies.get(name, SQUARE)) == BASES[name]
    assert strategies.get(name, SQUARE).name == name


def test_the_stages_axis_comes_first_and_splits_the_batch_outside_the_stack():
    strategy = strategies.get("pipeline_expert", Mesh.parse("stage=4,data=2"))
    rows, stages = ("data", "stage"), {"P": ("stage",)}
    of_all = {**stages, "E": ("data",)}
    assert tables(strategy) == ({"B": rows, "G": rows, **of_all}, of_all, of_all)


@pytest.mark.parametrize("count", [2, 3])
def test_hybrid_strategies_do_not_depend_on_order(count):
    for bases in itertools.permutations(BASES, count):
        hybrid = strategies.get("_".join(bases), SQUARE)
        for got, kind in zip(tables(hybrid), range(3), strict=True):
            expected = {}
            for base in bases:
                expected.update(BASES[base][kind])
            assert got == expected, (bases, kind)
        assert hybrid == strategies.get("_".join(sorted(bases)), SQUARE)


def test_an_fsdp_axis_splits_weights_and_the_batch():
    fsdp = strategies.get("fsdp", CUBE)
    state = {"M": ("fsdp", "data"), "*": ("fsdp", "data")}
    assert tables(fsdp) == (BATCH_OF_CUBE, state, state)
    assert tables(strategies.get("zero1", CUBE)) == (BATCH_OF_CUBE, {}, state)
    assert tables(strategies.get("data", CUBE)) == (BATCH_OF_CUBE, {}, {})
    everything = strategies.get("expert_fsdp_tensor", CUBE)
    weights = {"E": ("data",), **state, **HNV}
    assert tables(everything) == ({**BATCH_OF_CUBE, "E": ("data",), **HNV}, weights, weights)


def test_fsdp_does_not_require_data():
    mesh = Mesh.parse("fsdp=4,model=2")
    assert strategies.get("fsdp_tensor", mesh).activations == {
        "B": ("fsdp",),
        "G": ("fsdp",),
        **HNV,
    }
    with pytest.raises(ValueError, match="'data', which `mesh=fsdp=4,model=2` lacks"):
        strategies.get("expert_fsdp", mesh)


def test_context_splits_positions_and_groups_over_its_own_axis():
    context_only = strategies.get("context", CONTEXT)
    assert tables(context_only) == ({"L": ("context",), "G": ("context",)}, {}, {})
    several = strategies.get("sequence_context_data", CONTEXT).activations
    assert several == {"B": ("data",), "G": ("context", "data"), "L": ("context", "model")}
    with pytest.raises(ValueError, match="`strategy=data_context` needs axis 'context', which"):
        strategies.get("data_context", SQUARE)


def test_a_table_applies_to_every_kind_unless_it_names_one():
    expected = ({**BGE, "H": ("model",)},) * 3
    assert tables(strategies.get("B,G,E->data; H->model", SQUARE)) == expected
    text = "B , G -> data | weights: M->data;H->model | moments: H->none"
    assert tables(strategies.get(text, SQUARE)) == (
        BG,
        {**BG, "M": ("data",), "H": ("model",)},
        {**BG, "M": ("data",), "H": ()},
    )
    several = strategies.get("activations: B->data,model", SQUARE)
    assert tables(several) == ({"B": ("data", "model")}, {}, {})
    assert strategies.get("weights: M->data | M->model", SQUARE).activations == {"M": ("model",)}
    assert strategies.get("weights: M->data | M->model", SQUARE).weights == {"M": ("data",)}


@st.composite
def written(draw) -> Strategy:
    """Draws a strategy over the axes of CUBE that splits moments at least as much as weights."""
    axes = st.permutations(CUBE.names).flatmap(
        lambda order: st.integers(0, len(order)).map(lambda count: tuple(order[:count]))
    )
    table = st.dictionaries(st.sampled_from(sorted(LETTERS)), axes, max_size=5)
    weights = draw(table)
    return Strategy("any", draw(table), weights, {**weights, **draw(table)})


@hypothesis.given(written())
def test_strategies_round_trip_through_text(strategy):
    hypothesis.assume(strategy.activations or strategy.weights or strategy.moments)
    assert tables(strategies.get(strategy.to_text(), CUBE)) == tables(strategy)


def test_axes_of_a_strategy_are_listed():
    assert strategies.get("zero1_tensor", CUBE).axes == {"data", "fsdp", "model"}
    assert strategies.get("replicated", CUBE).axes == set()
    assert strategies.get("moments: M->fsdp", CUBE).axes == {"fsdp"}


@pytest.mark.parametrize(
    ("text", "mesh", "message"),
    [
        ("expart", SQUARE, "`strategy=expart`: unknown strategy 'expart'. Did you mean 'expert'?"),
        ("expert_tensr", SQUARE, "unknown strategy 'tensr'. Did you mean 'tensor'?"),
        ("", SQUARE, "unknown strategy ''"),
        ("tensor", FLAT, "`strategy=.*` needs axis 'model', which `mesh=data=8` lacks"),
        ("expert", Mesh.parse("model=2"), "needs axis 'data', which `mesh=model=2` lacks"),
        ("fsdp", Mesh.parse("model=2"), "needs axis 'data'"),
        ("H->modle", SQUARE, "axis 'modle', .*Did you mean 'model'?"),
        ("H->x,y", SQUARE, "needs axis 'x' and 'y', which `mesh=data=4,model=2` lacks"),
        ("H->", SQUARE, "'H->'; expected letters->axes"),
        ("H->model,none", SQUARE, "needs axis 'none'"),
        ("H->model,model", SQUARE, "'model,model' names an axis more than once"),
        ("X->model", SQUARE, "'X' is not the letter of a dimension. Valid: B"),
        ("h->model", SQUARE, "'h' is not the letter"),
        ("HN->model", SQUARE, "'HN' is not the letter"),
        ("H->model; H->data", SQUARE, "two rules for letter 'H'"),
        ("H->model; N", SQUARE, "'N'; expected letters->axes"),
        ("weight: H->model", SQUARE, "kind of tensor 'weight'. Did you mean 'weights'"),
        ("weights: H->model | weights: N->model", SQUARE, "two sections for weights"),
        ("H->model | N->model", SQUARE, "two sections for all kinds"),
    ],
)
def test_errors_name_the_invalid_part(text, mesh, message):
    with pytest.raises(ValueError, match=message):
        strategies.get(text, mesh)


def test_errors_name_the_option_that_set_the_strategy():
    with pytest.raises(ValueError, match=r"sharding.overrides\['a'\]=H->x` needs axis 'x'"):
        strategies.get("H->x", SQUARE, where="sharding.overrides['a']")
    with pytest.raises(ValueError, match="kind of tensor 'moment'. Did you mean 'moments'"):
        strategies.get("data", SQUARE).table("moment")
