"""Tests the table of letters, their traits, and the validation of layouts."""

from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core import letters
from lingvo_gshard.core.letters import LETTERS, check_layout


class LettersTest(testing.TestCase, parameterized.TestCase):
    def test_every_letter_has_a_meaning(self):
        self.assertEqual(set(LETTERS), set("BLKGSTECMHUNDVRPW"))
        meanings = [letter.meaning for letter in LETTERS.values()]
        self.assertTrue(all(meanings))
        self.assertEqual(len(set(meanings)), len(LETTERS))

    def test_traits_select_letters(self):
        self.assertEqual((letters.ROWS, letters.POSITIONS, letters.HIDDEN), ("BG", "LK", "H"))
        self.assertEqual((letters.STACKS, letters.WEIGHT_BATCH), ("RP", "EURP"))
        self.assertEqual(set(letters.TOKENS), set("BLKGSTC"))
        self.assertEqual(set(letters.INNER), set("HNV"))

    @parameterized.parameters(("GSEC", 4), ("", 0), ("BLM", None), ("BrM", 3))
    def test_accepts_valid_layouts(self, layout, rank):
        check_layout(layout, rank)

    @parameterized.parameters(
        ("GSE", 4, "'GSE' has 3 letters for a tensor of rank 4"),
        ("GXE", 3, "'X' names no dimension. Valid: "),
        (
            "GSG",
            3,
            "'GSG' repeats the letter 'G'; name one of them 'g' and declare LOCAL_LETTERS",
        ),
    )
    def test_rejects_invalid_layouts(self, layout, rank, message):
        with self.assertRaisesRegex(ValueError, message):
            check_layout(layout, rank)

    def test_dimensions_without_a_name_may_be_repeated(self):
        letters.check_layout("B___", 4)
        with self.assertRaisesRegex(ValueError, "every dimension needs a letter"):
            letters.check_layout("B_", 2, may_be_unnamed=False)
        with self.assertRaisesRegex(ValueError, "4 letters for a tensor of rank 3"):
            letters.check_layout("B___", 3)


if __name__ == "__main__":
    testing.main()
