"""Tests Partitioning: every weight under every strategy, overrides, and storage."""

import math

import hypothesis
import hypothesis.strategies as st
import tensorflow as tf
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import context
from lingvo_gshard.core.config.registry import Experiment
from lingvo_gshard.core.letters import LETTERS
from lingvo_gshard.layers.embedding import LearnedPositions
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.sharding.partitioning import (
    Partitioning,
    Split,
    axes_of,
    current_partitioning,
    parts_of,
    use_partitioning,
)
from lingvo_gshard.sharding.strategies import Strategy
from lingvo_gshard.tasks.translation import TranslationTask
from lingvo_gshard.training.step.adafactor import Adafactor
from lingvo_gshard.wings.gin.binding import apply_gin


def translation_task() -> TranslationTask:
    """Returns a task whose encoder and decoder have layers and weights of every kind."""
    stack = TransformerStack.params().set(num_layers=2, num_heads=8, hidden_dim=32)
    stack.moe.set(num_experts=8)
    p = TranslationTask.params().set(
        source_vocabulary_size=40, target_vocabulary_size=48, model_dim=16, tie_softmax=False
    )
    p.set(encoder=stack, decoder=stack.copy().set(is_decoder=True))
    p.positions = LearnedPositions.params().set(max_length=24)
    return TranslationTask(p)


SPECS = {spec.path: spec for spec in translation_task().variable_specs().flatten()}

# Each letter of a layout is followed by its axis: d is data, m is model, f is fsdp.
MESHES = {
    "replicated": "data=1",
    "data": "data=8",
    "expert": "data=8",
    "tensor": "model=8",
    "fsdp": "data=8",
    "zero1": "data=8",
    "expert_tensor": "data=4,model=2",
    "folded_tensor": "data=4,model=2",
    "expert_fsdp": "data=8",
    "expert_fsdp_tensor": "data=2,fsdp=2,model=2",
}
TABLE = """
weight     replicated data expert tensor fsdp zero1 expert_tensor expert_fsdp expert_fsdp_tensor
table      VM         VM   VM     VmM    VMd  VM    VmM           VMd         VmMfd
position   LM         LM   LM     LM     LMd  LM    LM            LMd         LMfd
softmax    MV         MV   MV     MVm    MdV  MV    MVm           MdV         MfdVm
scale      M          M    M      M      Md   M     M             Md          Mfd
bias       M          M    M      M      Md   M     M             Md          Mfd
w_query    MND        MND  MND    MNmD   MdND MND   MNmD          MdND        MfdNmD
w_key      MND        MND  MND    MNmD   MdND MND   MNmD          MdND        MfdNmD
w_value    MND        MND  MND    MNmD   MdND MND   MNmD          MdND        MfdNmD
mix        NDM        NDM  NDM    NmDM   NDMd NDM   NmDM          NDMd        NmDMfd
w_in       MH         MH   MH     MHm    MdH  MH    MHm           MdH         MfdHm
w_out      HM         HM   HM     HmM    HMd  HM    HmM           HMd         HmMfd
b_in       H          H    H      Hm     H    H     Hm            H           Hm
b_out      M          M    M      M      Md   M     M             Md          Mfd
expert_in  EMH        EMH  EdMH   EMHm   EMdH EMH   EdMHm         EdMH        EdMfHm
expert_out EHM        EHM  EdHM   EHmM   EHMd EHM   EdHmM         EdHM        EdHmMf
w_gate     ME         ME   ME     ME     MdE  ME    ME            MdE         MfdE
"""
# The moments of zero1. All other strategies split moments like their weights.
ZERO1_MOMENTS = {"VM": "VMd", "MND": "MdND", "NDM": "NDMd", "EMH": "EMdH", "ME": "MdE", "H": "H"}


def weight_of(path: str) -> str:
    """Returns the table row of a weight's path."""
    name = path.rpartition(".")[2]
    if path == "softmax.w":
        return "softmax"
    if path == "positions.table":
        return "position"
    if name == "w_out" and "attention" in path:
        return "mix"
    if "layers[1].feed_forward" in path and name in ("w_in", "w_out"):
        return name.replace("w_", "expert_")
    return name


def expected_of(strategy: str) -> dict[str, str]:
    if strategy == "folded_tensor":
        # Experts take the axis of H.
        return expected_of("expert_tensor") | {"expert_in": "EdmMH", "expert_out": "EdmHM"}
    header, *rows = (line.split() for line in TABLE.strip().splitlines())
    return {row[0]: row[header.index(strategy)] for row in rows}


def in_letters(layout: str, split: Split) -> str:
    """Returns a sharding in the notation of the table: `EdMH` for E over data."""
    return "".join(
        letter + "".join(axis[0] for axis in axes)
        for letter, axes in zip(layout, split, strict=True)
    )


class TablesTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(*MESHES)
    def test_every_weight_follows_its_table(self, strategy):
        partitioning = Partitioning.make(MESHES[strategy], strategy)
        expected = expected_of(strategy)
        got = {path: in_letters(s.layout, partitioning.spec_split(s)) for path, s in SPECS.items()}
        self.assertEqual(got, {path: expected[weight_of(path)] for path in SPECS})
        self.assertEqual({weight_of(path) for path in SPECS}, set(expected))
        for spec in SPECS.values():
            self.assertEqual(partitioning.spec_storage_split(spec), partitioning.spec_split(spec))

    @parameterized.parameters(*MESHES)
    def test_moments_follow_their_weight_except_under_zero1(self, strategy):
        partitioning = Partitioning.make(MESHES[strategy], strategy)
        for spec in SPECS.values():
            moments = in_letters(spec.layout, partitioning.spec_split(spec, "moments"))
            if strategy != "zero1":
                self.assertEqual(moments, in_letters(spec.layout, partitioning.spec_split(spec)))
            elif spec.layout in ZERO1_MOMENTS:
                self.assertEqual(moments, ZERO1_MOMENTS[spec.layout])

    def test_factored_moments_are_split_by_their_remaining_letters(self):
        moments = Adafactor(Adafactor.params().set(min_factored_size=2)).moment_specs(
            translation_task().variable_specs()
        )
        partitioning = Partitioning.make("data=2,fsdp=2,model=2", "expert_fsdp_tensor")
        mixture = moments.encoder.layers[1].feed_forward
        got = {
            name: in_letters(spec.layout, partitioning.spec_split(spec, "moments"))
            for name, spec in mixture.experts.w_in.items()
        }
        self.assertEqual(got, {"row_moment": "EdMf", "column_moment": "EdHm"})
        gate = {n: partitioning.spec_split(s, "moments") for n, s in mixture.router.w_gate.items()}
        self.assertEqual(gate, {"second_moment": (("fsdp", "data"), ())})

    @parameterized.parameters(
        ("data", "data=8", "BdLM BdLH BdLV BdNLK BdLND GdSM GdSEC EGdCM EGdCH"),
        ("expert", "data=8", "BdLM BdLH BdLV BdNLK BdLND GdSM GdSEC EdGCM EdGCH"),
        ("tensor", "model=8", "BLM BLHm BLVm BNmLK BLNmD GSM GSEC EGCM EGCHm"),
        ("fsdp", "data=8", "BdLM BdLH BdLV BdNLK BdLND GdSM GdSEC EGdCM EGdCH"),
        (
            "expert_tensor",
            "data=4,model=2",
            "BdLM BdLHm BdLVm BdNmLK BdLNmD GdSM GdSEC EdGCM EdGCHm",
        ),
        (
            "expert_fsdp_tensor",
            "data=2,fsdp=2,model=2",
            "BfdLM BfdLHm BfdLVm BfdNmLK BfdLNmD GfdSM GfdSEC EdGfCM EdGfCHm",
        ),
        (
            "expert_sequence_tensor",
            "data=4,model=2",
            "BdLmM BdLHm BdLVm BdNmLK BdLNmD GdSM GdSEC EdGCM EdGCHm",
        ),
        (
            "expert_context_sequence_tensor",
            "data=2,context=2,model=2",
            "BdLcmM BdLcHm BdLcVm BdNmLcK BdLcNmD GcdSM GcdSEC EdGcCM EdGcCHm",
        ),
    )
    def test_activations_follow_their_table(self, strategy, mesh, expected):
        partitioning = Partitioning.make(mesh, strategy)
        layouts = ("BLM", "BLH", "BLV", "BNLK", "BLND", "GSM", "GSEC", "EGCM", "EGCH")
        got = " ".join(in_letters(layout, partitioning.split(layout)) for layout in layouts)
        self.assertEqual(got, expected)


def first_claims(layout: str, table: dict, unsplit: str) -> list[tuple[str, ...]]:
    """Assigns each axis to the first dimension whose letter requests it; L and K come last."""
    table = {x: table.get(x, table.get(LETTERS[x].follows, ())) for x in layout}
    owner = {}
    for axis in ("data", "fsdp", "model"):
        wanting = [x for x in layout if x not in unsplit and axis in table.get(x, ())]
        owner[axis] = min(wanting, key="LK".__contains__, default=None)
    return [tuple(a for a in table.get(x, ()) if owner[a] == x) for x in layout]


letters = st.sampled_from(sorted(LETTERS))
some_axes = st.lists(st.sampled_from(["data", "fsdp", "model"]), unique=True, max_size=3)


class SplitTest(testing.TestCase):
    @hypothesis.settings(deadline=None)
    @hypothesis.given(
        st.lists(letters, unique=True, max_size=5),
        st.dictionaries(letters, some_axes.map(tuple), max_size=9),
        st.sets(letters, max_size=3),
    )
    def test_the_first_letter_claims_an_axis(self, layout, table, unsplit):
        partitioning = Partitioning.make("data=2,fsdp=2,model=2", "replicated")
        partitioning = Partitioning(partitioning.mesh, Strategy("any", table, {}, {}))
        split = partitioning.split("".join(layout), unsplit="".join(unsplit))
        self.assertEqual(list(split), first_claims("".join(layout), table, "".join(unsplit)))
        axes = [axis for axes in split for axis in axes]
        self.assertEqual(len(axes), len(set(axes)))

    def test_axes_of_reserved_letters_are_not_used(self):
        partitioning = Partitioning.make("data=4,model=2", "data_sequence_tensor")
        self.assertEqual(in_letters("BL", partitioning.split("BL")), "BdLm")
        self.assertEqual(in_letters("BL", partitioning.split("BL", reserved="N")), "BdL")
        self.assertEqual(in_letters("BL", partitioning.split("BL", reserved="D")), "BdLm")
        with self.assertRaisesRegex(ValueError, "repeats the letter 'B'"):
            partitioning.split("BL", reserved="B")

    def test_activation_axes_follow_the_overrides_of_the_current_layer(self):
        overrides = {"task.head": "L->model"}
        partitioning = Partitioning.make("data=4,model=2,one=1", "B->data,one; L->none", overrides)
        seen = []

        @tf.function(autograph=False)
        def traced():
            seen.append((axes_of("BL"), parts_of("BL")))
            with use_partitioning(partitioning):
                seen.append((axes_of("BL"), parts_of("BL")))
                with context.override(layer_path="head"):
                    seen.append((axes_of("BLM"), parts_of("BLM")))

        traced()
        self.assertEqual(
            seen,
            [
                (((), ()), (1, 1)),
                ((("data",), ()), (4, 1)),
                ((("data",), ("model",), ()), (4, 2, 1)),
            ],
        )
        with use_partitioning(partitioning):
            self.assertEqual(axes_of("BL"), ((), ()))


# Each dimension's letter, size and axes; the first letter that an axis divides evenly has it.
UNEVEN = [
    ("expert_fsdp", "data=8", "EMH", (4, 96, 40), "EMdH"),
    ("expert_fsdp", "data=8", "EMH", (16, 96, 40), "EdMH"),
    ("expert_fsdp", "data=4,fsdp=2", "EMH", (4, 96, 4096), "EdMfH"),
    ("expert_fsdp", "data=8", "EMH", (4, 90, 4096), "EMHd"),
    ("expert_fsdp", "data=4,fsdp=2", "MH", (90, 4096), "MfHd"),
    ("fsdp_tensor", "data=4,model=2", "ND", (512, 256), "NmdD"),
    ("fsdp_tensor", "data=4,model=2", "ND", (8, 6), "NmD"),
    ("fsdp", "data=4", "RND", (64, 512, 256), "RNdD"),
    # No dimension divides evenly: the first letter with a rule is padded during the step.
    ("expert", "data=8", "EMH", (4, 96, 40), "EdMH"),
    ("expert_fsdp", "data=8", "EMH", (5, 90, 900), "EdMH"),
    ("tensor", "model=8", "VM", (32003, 90), "VmM"),
]


class StorageTest(testing.TestCase, parameterized.TestCase):
    @hypothesis.settings(deadline=None)
    @hypothesis.given(st.lists(st.integers(1, 40), min_size=3, max_size=3))
    def test_dimensions_are_stored_in_equal_parts(self, shape):
        partitioning = Partitioning.make("data=4,fsdp=2,model=3", "replicated")
        split = (("data", "fsdp"), (), ("model",))
        stored = partitioning.storage_split(shape, split)
        by_rest = {0: ("data", "fsdp"), 4: ("data",), 2: ("fsdp",), 6: ("fsdp",)}
        self.assertEqual(stored[0], by_rest.get(shape[0] % 8, ()))
        self.assertEqual(stored[1], ())
        self.assertEqual(stored[2], ("model",) if shape[2] % 3 == 0 else ())

    @parameterized.parameters(*UNEVEN)
    def test_an_axis_goes_to_the_first_dimension_that_it_divides(
        self, strategy, mesh, layout, shape, expected
    ):
        partitioning = Partitioning.make(mesh, strategy)
        self.assertEqual(
            in_letters(layout, partitioning.split(layout, "weights", shape=shape)), expected
        )

    @hypothesis.settings(deadline=None)
    @hypothesis.given(
        shape=st.tuples(*[st.integers(1, 600)] * 3),
        strategy=st.sampled_from(["expert_fsdp_tensor", "expert_fsdp", "fsdp_tensor", "zero1"]),
    )
    def test_stored_parts_are_equal_and_no_axis_is_used_twice(self, shape, strategy):
        partitioning = Partitioning.make("data=4,fsdp=2,model=3", strategy)
        split = partitioning.split("EMH", "moments", shape=shape)
        stored = partitioning.storage_split(shape, split)
        axes = [axis for each in split for axis in each]
        self.assertEqual(len(axes), len(set(axes)))
        for size, wanted, kept in zip(shape, split, stored, strict=True):
            self.assertEqual(size % partitioning.parts(kept), 0)
            self.assertContainsSubset(kept, wanted)
        # A large weight is whole only if no axis divides any of its dimensions.
        free = {"data", "fsdp"} - {axis for each in stored for axis in each}
        for axis in free if math.prod(shape) >= 2**16 else ():
            for size, kept in zip(shape, stored, strict=True):
                rest = size // partitioning.parts(kept) % partitioning.parts([axis])
                self.assertNotEqual(rest, 0)


W_IN = "encoder.layers[1].feed_forward.w_in"


class OverridesTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("encoder.layers[1].feed_forward", W_IN, True),
        ("task.encoder.layers[1].feed_forward", W_IN, True),
        ("task.encoder.layers[1].feed_forward", f"{W_IN}/second_moment", True),
        ("encoder.layers[*].feed_forward", W_IN, True),
        ("encoder.layers[?]", W_IN, True),
        ("encoder.layers[1]", "encoder.layers[1]", True),
        ("encoder", W_IN, True),
        ("*.w_in", W_IN, True),
        ("*.w_in", f"{W_IN}/second_moment", True),
        ("task", W_IN, True),
        ("task", "", True),
        ("*", "", True),
        ("encoder.layers[1].feed", W_IN, False),
        ("encoder.layers[1]", "encoder.layers[11].norm", False),
        ("encoder.layers[12]", "encoder.layers[1].norm", False),
        ("encoder.layers1", "encoder.layers[1].norm", False),
        ("layers[1]", W_IN, False),
        ("Encoder", W_IN, False),
        ("encoder", "", False),
    )
    def test_patterns_match_paths(self, pattern, path, holds):
        partitioning = Partitioning.make("data=2,model=2", "tensor", {pattern: "H->data"})
        self.assertEqual(
            partitioning.split("MH", "weights", path), ((), ("data",) if holds else ("model",))
        )

    def test_an_override_replaces_only_its_letters(self):
        overrides = {
            "encoder.layers[*]": "H->none",
            "encoder.layers[1].feed_forward": "weights: H->data,model; E->none",
        }
        partitioning = Partitioning.make("data=2,model=2", "expert_tensor", overrides)
        self.assertEqual(in_letters("EMH", partitioning.split("EMH", "weights")), "EdMHm")
        self.assertEqual(in_letters("EMH", partitioning.split("EMH", "weights", W_IN)), "EMHdm")
        self.assertEqual(
            in_letters("EMH", partitioning.split("EMH", "moments", f"{W_IN}/first")), "EMHdm"
        )
        self.assertEqual(
            in_letters("BLH", partitioning.split("BLH", path="encoder.layers[1].feed_forward")),
            "BdLH",
        )
        self.assertEqual(
            in_letters("MND", partitioning.split("MND", "weights", "encoder.layers[0].a")), "MNmD"
        )
        self.assertEqual(
            in_letters("BLH", partitioning.split("BLH", path="decoder.layers[1]")), "BdLHm"
        )
        partitioning.check_overrides(translation_task().layer_paths())

    def test_rejects_overrides_of_unknown_layers_or_tables(self):
        paths = translation_task().layer_paths()
        wrong = {"task.encoder.layers[2].feed_forward": "H->none"}
        partitioning = Partitioning.make("data=2,model=2", "tensor", wrong)
        name = r"'task.encoder.layers\[2\].feed_forward'"
        with self.assertRaisesRegex(
            ValueError, f"sharding.overrides: .*{name}. Did you mean 'enco"
        ):
            partitioning.check_overrides(paths)
        for rule, message in (
            ("tensor", r"sharding.overrides\['encoder'\]=tensor; expected a tab"),
            (("H", "model"), r"\['encoder'\]=\('H', 'model'\); expected a table"),
            ("H->modl", r"sharding.overrides\['encoder'\]=H->modl` needs axis"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                Partitioning.make("data=2,model=2", "tensor", {"encoder": rule})


class OptionsTest(testing.TestCase):
    def test_gin_configures_a_partitioning(self):
        bindings = [
            "sharding.mesh = 'data=4,model=2'",
            "sharding.strategy = 'tensor'",
            "sharding.overrides = {'encoder.layers[*]': 'H->none', 'decoder': 'weights: N->none'}",
        ]
        params = apply_gin(Experiment.params(), [], bindings).sharding
        partitioning = Partitioning.make(params.mesh, params.strategy, params.overrides)
        self.assertEqual(
            (str(partitioning.mesh), partitioning.strategy.name), ("data=4,model=2", "tensor")
        )
        self.assertEqual(
            [pattern for pattern, _ in partitioning.overrides], ["encoder.layers[*]", "decoder"]
        )
        untouched = Experiment.params().sharding
        self.assertEqual((untouched.mesh, untouched.strategy, untouched.overrides), ("", "", {}))

    def test_axes_that_split_nothing_are_reported(self):
        mesh = "data=2,fsdp=1,model=2"
        self.assertEqual(Partitioning.make(mesh, "data").unused_axes, ("model",))
        self.assertEqual(Partitioning.make(mesh, "data", {"a": "H->model"}).unused_axes, ())
        self.assertEqual(Partitioning.make(mesh, "expert_tensor").unused_axes, ())

    def test_rejects_unknown_letters_and_kinds(self):
        partitioning = Partitioning.make("data=2", "data")
        with self.assertRaisesRegex(ValueError, "'BX': 'X' names no dimension"):
            partitioning.split("BX")
        with self.assertRaisesRegex(ValueError, "kind of tensor 'weight'. Did you mean 'weights'"):
            partitioning.split("BL", "weight")

    def test_use_partitioning_sets_the_current_one(self):
        partitioning = Partitioning.make("data=2", "data")
        self.assertIsNone(current_partitioning())
        with use_partitioning(partitioning):
            self.assertIs(current_partitioning(), partitioning)
            with use_partitioning(None):
                self.assertIsNone(current_partitioning())
            self.assertIs(current_partitioning(), partitioning)
        self.assertIsNone(current_partitioning())


if __name__ == "__main__":
    testing.main()
