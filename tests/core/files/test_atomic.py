"""Tests write_atomically: a failure leaves no partial file."""

import os
import pathlib
from unittest import mock

from lingvo_gshard import testing
from lingvo_gshard.core.files import atomic


class WriteAtomicallyTest(testing.TestCase):
    def test_writes_and_replaces_a_file(self):
        folder = pathlib.Path(self.get_temp_dir())
        path = str(folder / "b.bin")
        atomic.write_atomically(path, b"one")
        atomic.write_atomically(path, b"two")
        with open(path, "rb") as file:
            self.assertEqual(file.read(), b"two")
        self.assertEqual(os.listdir(folder), ["b.bin"])
        self.assertEqual(os.stat(path).st_mode & 0o777, 0o644)

    def test_a_failure_preserves_the_old_file(self):
        folder = pathlib.Path(self.get_temp_dir())
        path = str(folder / "b.bin")
        atomic.write_atomically(path, b"one")

        def full(descriptor):
            raise OSError("no space left")

        self.enter_context(mock.patch.object(os, "fsync", full))
        with self.assertRaisesRegex(OSError, "no space left"):
            atomic.write_atomically(path, b"two")
        with open(path, "rb") as file:
            self.assertEqual(file.read(), b"one")
        self.assertEqual(os.listdir(folder), ["b.bin"])


if __name__ == "__main__":
    testing.main()
