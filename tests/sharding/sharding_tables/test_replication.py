# tests: sharding/sharding_tables.py
"""Tests the list of tensors that stay replicated although a strategy splits their letters."""

from lingvo_gshard import testing
from lingvo_gshard.core import initializers
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.sharding.sharding_tables import (
    Replicated,
    check_replicated,
    describe,
    replicated,
)

MIB = 2**20


def spec(path, layout, *shape, unsplit="", dtype="float32"):
    return VariableSpec(path, layout, shape, dtype, initializers.constant(0.0), unsplit)


SPECS = [
    spec("split", "EMH", 8, 4, 3),
    spec("uneven", "EMH", 6, 4, 2),
    spec("half", "EMH", 6, 4, 4),
    spec("router", "ME", 4, 8, unsplit="E"),
    spec("norm", "M", 4),
    spec("scalar", ""),
    spec("feed_forward.w_in", "MH", 4, 16, dtype="bfloat16"),
    spec("none", "BV", 2, 8),
]


def replicated_rows(strategy, mesh, overrides=None, **options):
    partitioning = Partitioning.make(mesh, strategy, overrides)
    return {row.path: row for row in replicated(SPECS, partitioning, **options)}


class ReplicationTest(testing.TestCase):
    def test_lists_indivisible_tensors_and_those_the_layer_does_not_split(self):
        rows = replicated_rows("expert", "data=4")
        self.assertEqual(
            rows,
            {
                "uneven": Replicated("uneven", (6, 4, 2), 192, "E of 6 does not divide by 4"),
                "half": Replicated("half", (6, 4, 4), 384, "E of 6 does not divide by 4"),
                "router": Replicated("router", (4, 8), 128, "the layer does not split E"),
            },
        )
        self.assertEqual(list(rows), ["half", "uneven", "router"])

    def test_tensors_split_by_another_letter_are_not_replicated(self):
        rows = replicated_rows("expert_tensor", "data=4,model=4")
        self.assertEqual(rows.keys(), {"uneven", "router"})
        self.assertEqual(
            rows["uneven"].reason, "E of 6 does not divide by 4; H of 2 does not divide by 4"
        )

    def test_the_override_is_named(self):
        rows = replicated_rows("tensor", "model=4", {"feed_forward": "weights: H->none"})
        self.assertEqual(
            rows["feed_forward.w_in"],
            Replicated("feed_forward.w_in", (4, 16), 128, "an override does not split H"),
        )

    def test_tensors_without_a_rule_are_not_listed(self):
        self.assertEqual(replicated_rows("replicated", "data=4"), {})
        self.assertEqual(replicated_rows("data", "data=4"), {})
        self.assertEqual(replicated_rows("expert", "data=1"), {})
        self.assertEqual(replicated_rows("zero1", "data=4"), {})
        # zero1 splits M of the moments, but 4 does not divide by 8.
        self.assertEqual(
            replicated_rows("zero1", "data=8", kind="moments")["norm"].reason,
            "M of 4 does not divide by 8",
        )

    def test_small_tensors_are_omitted(self):
        self.assertEqual(replicated_rows("expert", "data=4", least=192).keys(), {"half", "uneven"})
        self.assertEqual(replicated_rows("expert", "data=4", least=385), {})

    def test_exceeding_the_limit_raises_with_the_flag_and_the_tensors(self):
        rows = [Replicated(f"w{n}", (n,), n * MIB, f"reason {n}") for n in range(12, 0, -1)]
        check_replicated(rows, 78.0)
        check_replicated([], 0.0)
        with self.assertRaises(ValueError) as error:
            check_replicated(iter(rows), 77.5)
        lines = str(error.exception).splitlines()
        self.assertEqual(
            lines[0],
            "`max_replicated_mb=77.5`: every device would hold 78.0 MiB in full although the "
            "strategy splits a letter of them:",
        )
        self.assertEqual(lines[1], "  w12 [12], 12.0 MiB: reason 12")
        self.assertEqual(lines[1], f"  {describe(rows[0])}")
        self.assertEqual(len(lines), 12)
        self.assertEqual(lines[-1], "  and 2 more")


if __name__ == "__main__":
    testing.main()
