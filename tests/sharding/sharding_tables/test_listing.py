# tests: sharding/sharding_tables.py
"""Tests the listing of weights and moments: their sharding and bytes per device."""

import math

from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import initializers
from lingvo_gshard.core.layer import VariableSpec
from lingvo_gshard.core.nested_map import NestedMap
from lingvo_gshard.sharding.partitioning import Partitioning
from lingvo_gshard.sharding.sharding_tables import WeightRow, split_in_words, weight_rows


def spec(path: str, layout: str, *shape: int, dtype: str = "float32", unsplit: str = ""):
    return VariableSpec(path, layout, shape, dtype, initializers.constant(0.0), unsplit)


PLACED = Partitioning.make("data=8,model=2", "expert_tensor")


class ListingTest(testing.TestCase, parameterized.TestCase):
    def test_a_row_describes_a_weight(self):
        (row,) = weight_rows([spec("moe.w_in", "EMH", 16, 4, 6, dtype="bfloat16")], PLACED)
        expected = WeightRow(
            path="moe.w_in",
            layout="EMH",
            shape=(16, 4, 6),
            dtype="bfloat16",
            split="E over data (8), H over model (2)",
            bytes=16 * 4 * 6 * 2,
            bytes_per_device=2 * 4 * 3 * 2,
            note="",
        )
        self.assertEqual(row, expected)

    def test_unsplit_weights_and_scalars(self):
        rows = weight_rows([spec("norm.scale", "M", 5), spec("step", "", dtype="int32")], PLACED)
        self.assertEqual(
            [(r.split, r.bytes, r.bytes_per_device, r.note) for r in rows],
            [("replicated", 20, 20, ""), ("replicated", 4, 4, "")],
        )

    def test_indivisible_dimensions_are_noted(self):
        rows = weight_rows([spec("w", "EMH", 12, 4, 6), spec("v", "EMH", 12, 4, 5)], PLACED)
        note = "E of 12 does not divide by 8: not split"
        self.assertEqual((rows[0].split, rows[0].note), ("H over model (2)", note))
        self.assertEqual(rows[0].bytes_per_device, rows[0].bytes // 2)
        self.assertEqual(rows[1].split, "replicated")
        self.assertEqual(rows[1].note, f"{note}; H of 5 does not divide by 2: not split")

    def test_letters_that_are_not_split_need_no_note(self):
        (row,) = weight_rows([spec("router.w_gate", "ME", 4, 12, unsplit="E")], PLACED)
        self.assertEqual((row.split, row.note), ("replicated", ""))

    def test_moments_use_their_own_table(self):
        partitioning = Partitioning.make("data=8", "zero1")
        specs = NestedMap(w=NestedMap(second=spec("w/second", "MH", 16, 2)))
        (weight,), (moment,) = (
            weight_rows(specs, partitioning, kind) for kind in ("weights", "moments")
        )
        self.assertEqual((weight.split, moment.split), ("replicated", "M over data (8)"))
        self.assertEqual(moment.bytes_per_device, weight.bytes_per_device // 8)

    def test_a_dimension_can_be_split_over_two_axes(self):
        partitioning = Partitioning.make("data=4,fsdp=2", "fsdp")
        words = split_in_words("BLM", partitioning.split("BLM"), partitioning)
        self.assertEqual(words, "B over fsdp and data (2 x 4)")

    @parameterized.parameters("expert", "fsdp", "expert_fsdp")
    def test_bytes_of_all_devices_sum_to_the_total(self, strategy):
        partitioning = Partitioning.make("data=8", strategy)
        rows = weight_rows([spec("w", "EMH", 16, 32, 3), spec("b", "M", 3)], partitioning)
        self.assertEqual([row.bytes for row in rows], [4 * math.prod(row.shape) for row in rows])
        self.assertEqual(
            [row.bytes_per_device for row in rows], [rows[0].bytes // 8, rows[1].bytes]
        )


if __name__ == "__main__":
    testing.main()
