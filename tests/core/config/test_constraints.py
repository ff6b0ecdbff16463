"""Tests the types and ranges of hyperparameters."""

import math

import numpy as np
from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.config.params import Configurable, Params, ParamsError
from lingvo_gshard.wings.gin.binding import apply_gin


class Model(Configurable):
    """A class with a hyperparameter of each kind of range."""

    @classmethod
    def params(cls):
        p = super().params()
        p.define("model_dim", 0, "Must be set.", minimum=1)
        p.define("rate", 0.1, "A share.", minimum=0, below=1)
        p.define("scale", 2.0, "A factor.", above=0, maximum=8)
        p.define("shift", 0.0, "Any number.")
        p.define("use_bias", True, "A bool.")
        p.define("activation", "relu", "A string.")
        p.define("order", "", "One of these.", choices=("", "first", "last"))
        p.define("anything", None, "Anything.")
        return p


class Tree(Configurable):
    """A root with one node."""

    @classmethod
    def params(cls):
        p = super().params()
        p.define("model", Model.params(), "A model.")
        return p


class ConstraintsTest(testing.TestCase, parameterized.TestCase):
    @parameterized.parameters(
        ("model_dim", -1, "a whole number of 1 or more"),
        ("model_dim", 2**31, "a whole number of 1 or more that fits into 32 bits"),
        ("model_dim", 3.0, "a whole number of 1 or more"),
        ("model_dim", True, "a whole number of 1 or more"),
        ("model_dim", "3", "a whole number of 1 or more"),
        ("model_dim", None, "a whole number of 1 or more"),
        ("rate", -0.1, "a number of 0 or more and below 1"),
        ("rate", 1.0, "a number of 0 or more and below 1"),
        ("rate", math.nan, "a number of 0 or more and below 1"),
        ("scale", 0, "a number above 0 and of 8 at most"),
        ("scale", 8.5, "a number above 0 and of 8 at most"),
        ("shift", math.inf, "a number"),
        ("shift", False, "a number"),
        ("use_bias", 1, "True or False"),
        ("activation", 3, "a string"),
        ("order", "frist", "'', 'first' or 'last'"),
    )
    def test_refuses_wrong_types_and_ranges(self, name, value, expected):
        p = Model.params()
        before = getattr(p, name)
        with self.assertRaises(ParamsError) as error:
            p.set(**{name: value})
        self.assertEqual(str(error.exception), f"Model.{name} is {value!r}; expected {expected}")
        self.assertEqual(getattr(p, name), before)

    def test_accepts_values_in_range_in_the_type_of_the_default(self):
        p = Model.params().set(model_dim=np.int64(3), rate=0, scale=8, shift=-5, anything=Model)
        values = dict(p.items())
        self.assertEqual(
            values, {**values, "model_dim": 3, "rate": 0.0, "scale": 8.0, "shift": -5.0}
        )
        self.assertIs(type(p.model_dim), int)
        self.assertIs(type(p.rate), float)

    def test_a_default_out_of_range_must_be_replaced_before_the_class_is_built(self):
        p = Model.params().set(model_dim=0)
        with self.assertRaisesRegex(
            ParamsError, r"Model.model_dim is 0; expected a whole number of 1"
        ):
            p.instantiate()
        self.assertEqual(p.set(model_dim=4).instantiate().p.model_dim, 4)

    def test_messages_name_the_path_in_a_located_tree_and_its_copies(self):
        tree = Tree.params().locate("task").copy()
        with self.assertRaisesRegex(ParamsError, r"^task.model.rate is 2"):
            tree.model.rate = 2
        with self.assertRaisesRegex(ParamsError, r"^task.model.model_dim is 0"):
            tree.model.copy().instantiate()

    def test_an_error_of_a_constructor_begins_with_the_path_of_its_params(self):
        class Refusing(Configurable):
            def __init__(self, params):
                super().__init__(params)
                raise ValueError("no such thing")

        with self.assertRaisesRegex(ParamsError, "^task.model: no such thing$"):
            Params(Refusing).locate("task.model").instantiate()
        with self.assertRaisesRegex(ValueError, "^no such thing$"):
            Params(Refusing).instantiate()

    def test_a_gin_setting_out_of_range_names_the_setting_and_the_path(self):
        with self.assertRaisesRegex(
            ValueError, r"`settings` 'model.rate = 1.5': model.rate is 1.5; "
        ):
            apply_gin(Tree.params(), [], ["model.rate = 1.5"])


if __name__ == "__main__":
    testing.main()
