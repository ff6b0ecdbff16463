# tests: core/config/registry.py
"""Tests imports of modules of the user: the module, or an error with the line that fails."""

import pathlib
import sys
from unittest import mock

from absl.testing import parameterized

from lingvo_gshard import testing
from lingvo_gshard.core.config import registry


class UserModulesTest(testing.TestCase, parameterized.TestCase):
    def write(self, text):
        """Writes the module of_the_user, which can then be imported; returns its file."""
        folder = pathlib.Path(self.get_temp_dir())
        self.enter_context(mock.patch.object(sys, "path", [str(folder), *sys.path]))
        self.addCleanup(sys.modules.pop, "of_the_user", None)
        file = folder / "of_the_user.py"
        file.write_text(text)
        return file

    def test_a_module_is_returned(self):
        self.write("size = 3\n")
        self.assertEqual(registry.import_module("of_the_user").size, 3)

    @parameterized.parameters("of_nobody", "of_nobody.inner", "os.of_nobody")
    def test_a_module_that_is_not_there_is_missing(self, name):
        with self.assertRaises(ModuleNotFoundError):
            registry.import_module(name)

    @parameterized.parameters(
        ("import os\ndef f(:\n", 2, "SyntaxError: invalid syntax"),
        ("import of_nobody\n", 1, "ModuleNotFoundError: No module named 'of_nobody'"),
        ("import json\n\njson.loads('')\n", 3, "JSONDecodeError: Expecting value: line 1 .*"),
        ("from lingvo_gshard import einsumm\n", 1, "ImportError: .*"),
        ("raise RuntimeError\n", 1, "RuntimeError"),
        ("raise SystemExit(3)\n", 1, r"it ends the program \(exit code 3\)"),
    )
    def test_the_line_of_the_user_that_fails_is_named(self, text, line, error):
        file = self.write(text)
        expected = f"^the module of_the_user cannot be imported: {file}:{line}: {error}$"
        with self.assertRaisesRegex(ValueError, expected):
            registry.import_module("of_the_user")


if __name__ == "__main__":
    testing.main()
