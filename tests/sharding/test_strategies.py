"""Tests base strategies, their unions, tables, and error messages."""

import itertools

import hypothesis
import hypothesis.strategies as st
from absl.testing import parameterized

from lingvo_gshard import testing
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
FOLDED = {"B": ("data",), "G": ("data", "model"), "E": ("data", "model")}
BATCH_OF_CUBE = {"B": ("fsdp", "data"), "G": ("fsdp", "data")}

# (activations, weights, moments) of each base strategy.
BASES = {
    "replicated": ({}, {}, {}),
    "data": (BG, {}, {}),
    "expert": (BGE, {"E": ("data",)}, {"E": ("data",)}),
    "folded": (FOLDED, {"E": ("data", "model")}, {"E": ("data", "model")}),
    "tensor": (HNV, HNV, HNV),
    "fsdp": (BG, {"M": ("data",), "*": ("data",)}, {"M": ("data",), "*": ("data",)}),
    "zero1": (BG, {}, {"M": ("data",), "*": ("data",)}),
    "sequence": ({"L": ("model",)}, {}, {}),
}
CONTEXT = Mesh.parse("data=2,context=2,model=2")


def tables(strategy: Strategy) -> tuple[dict, dict, dict]:
    return strategy.activations, strategy.weights, strategy.moments


class StrategiesTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(*BASES)
    def test_tables_of_base_strategies(self, name):
        self.assertEqual(set(strategies.base_names()), {*BASES, "context", "pipeline"})
        self.assertEqual(tables(strategies.get(name, SQUARE)), BASES[name])
        self.assertEqual(strategies.get(name, SQUARE).name, name)

    def test_the_stages_axis_comes_first_and_splits_the_batch_outside_the_stack(self):
        strategy = strategies.get("pipeline_expert", Mesh.parse("stage=4,data=2"))
        rows, stages = ("data", "stage"), {"P": ("stage",)}
        of_all = {**stages, "E": ("data",)}
        self.assertEqual(tables(strategy), ({"B": rows, "G": rows, **of_all}, of_all, of_all))

    @parameterized.parameters(2, 3)
    def test_hybrid_strategies_do_not_depend_on_order(self, count):
        for bases in itertools.permutations(BASES, count):
            hybrid = strategies.get("_".join(bases), SQUARE)
            for got, kind in zip(tables(hybrid), range(3), strict=True):
                expected = {}
                for base in bases:
                    for letter, axes in BASES[base][kind].items():
                        expected[letter] = max(axes, expected.get(letter, ()), key=len)
                self.assertEqual(got, expected, (bases, kind))
            self.assertEqual(hybrid, strategies.get("_".join(sorted(bases)), SQUARE))

    def test_an_fsdp_axis_splits_weights_and_the_batch(self):
        fsdp = strategies.get("fsdp", CUBE)
        state = {"M": ("fsdp", "data"), "*": ("fsdp", "data")}
        self.assertEqual(tables(fsdp), (BATCH_OF_CUBE, state, state))
        self.assertEqual(tables(strategies.get("zero1", CUBE)), (BATCH_OF_CUBE, {}, state))
        self.assertEqual(tables(strategies.get("data", CUBE)), (BATCH_OF_CUBE, {}, {}))
        everything = strategies.get("expert_fsdp_tensor", CUBE)
        weights = {"E": ("data",), **state, **HNV}
        self.assertEqual(
            tables(everything), ({**BATCH_OF_CUBE, "E": ("data",), **HNV}, weights, weights)
        )

    def test_fsdp_does_not_require_data(self):
        mesh = Mesh.parse("fsdp=4,model=2")
        self.assertEqual(
            strategies.get("fsdp_tensor", mesh).activations,
            {"B": ("fsdp",), "G": ("fsdp",), **HNV},
        )
        with self.assertRaisesRegex(ValueError, "'data', which `mesh=fsdp=4,model=2` lacks"):
            strategies.get("expert_fsdp", mesh)

    def test_context_splits_positions_and_groups_over_its_own_axis(self):
        context_only = strategies.get("context", CONTEXT)
        self.assertEqual(tables(context_only), ({"L": ("context",), "G": ("context",)}, {}, {}))
        several = strategies.get("sequence_context_data", CONTEXT).activations
        self.assertEqual(
            several, {"B": ("data",), "G": ("context", "data"), "L": ("context", "model")}
        )
        with self.assertRaisesRegex(
            ValueError, "`strategy=data_context` needs axis 'context', which"
        ):
            strategies.get("data_context", SQUARE)


@st.composite
def written(draw) -> Strategy:
    """Draws a strategy over the axes of CUBE that splits moments at least as much as weights."""
    axes = st.permutations(CUBE.names).flatmap(
        lambda order: st.integers(0, len(order)).map(lambda count: tuple(order[:count]))
    )
    table = st.dictionaries(st.sampled_from(sorted(LETTERS)), axes, max_size=5)
    weights = draw(table)
    return Strategy("any", draw(table), weights, {**weights, **draw(table)})


class TextTest(testing.TestCase, parameterized.TestCase):
    def test_a_table_applies_to_every_kind_unless_it_names_one(self):
        expected = ({**BGE, "H": ("model",)},) * 3
        self.assertEqual(tables(strategies.get("B,G,E->data; H->model", SQUARE)), expected)
        text = "B , G -> data | weights: M->data;H->model | moments: H->none"
        self.assertEqual(
            tables(strategies.get(text, SQUARE)),
            (
                BG,
                {**BG, "M": ("data",), "H": ("model",)},
                {**BG, "M": ("data",), "H": ()},
            ),
        )
        several = strategies.get("activations: B->data,model", SQUARE)
        self.assertEqual(tables(several), ({"B": ("data", "model")}, {}, {}))
        self.assertEqual(
            strategies.get("weights: M->data | M->model", SQUARE).activations, {"M": ("model",)}
        )
        self.assertEqual(
            strategies.get("weights: M->data | M->model", SQUARE).weights, {"M": ("data",)}
        )

    @hypothesis.settings(deadline=None)
    @hypothesis.given(written())
    def test_strategies_round_trip_through_text(self, strategy):
        hypothesis.assume(strategy.activations or strategy.weights or strategy.moments)
        self.assertEqual(tables(strategies.get(strategy.to_text(), CUBE)), tables(strategy))

    def test_axes_of_a_strategy_are_listed(self):
        self.assertEqual(strategies.get("zero1_tensor", CUBE).axes, {"data", "fsdp", "model"})
        self.assertEqual(strategies.get("replicated", CUBE).axes, set())
        self.assertEqual(strategies.get("moments: M->fsdp", CUBE).axes, {"fsdp"})

    @parameterized.parameters(
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
    )
    def test_errors_name_the_invalid_part(self, text, mesh, message):
        with self.assertRaisesRegex(ValueError, message):
            strategies.get(text, mesh)

    def test_errors_name_the_option_that_set_the_strategy(self):
        with self.assertRaisesRegex(ValueError, r"sharding.overrides\['a'\]=H->x` needs axis 'x'"):
            strategies.get("H->x", SQUARE, where="sharding.overrides['a']")
        with self.assertRaisesRegex(ValueError, "kind of tensor 'moment'. Did you mean 'moments'"):
            strategies.get("data", SQUARE).table("moment")


if __name__ == "__main__":
    testing.main()
