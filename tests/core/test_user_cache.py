# tests: core/files/cached.py
"""Tests where the user's cache folder is."""

import os
from unittest import mock

from lingvo_gshard import testing
from lingvo_gshard.core.files import cached


class UserCacheTest(testing.TestCase):
    def test_the_folder_follows_the_environment_and_the_argument(self):
        self.enter_context(mock.patch.dict(os.environ, {"XDG_CACHE_HOME": "/x", "HOME": "/h"}))
        self.assertEqual(cached.directory("vocabularies"), "/x/lingvo_gshard/vocabularies")
        del os.environ["XDG_CACHE_HOME"]
        self.assertEqual(cached.directory("vocabularies"), "/h/.cache/lingvo_gshard/vocabularies")
        self.assertEqual(cached.directory("vocabularies", "~/v"), "/h/v")


if __name__ == "__main__":
    testing.main()
