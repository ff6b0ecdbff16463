"""Tests where the user's cache folder is."""

from lingvo_gshard.core.files import cached


def test_the_folder_follows_the_environment_and_the_argument(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cached.directory("vocabularies") == "/x/lingvo_gshard/vocabularies"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert cached.directory("vocabularies") == "/h/.cache/lingvo_gshard/vocabularies"
    assert cached.directory("vocabularies", "~/v") == "/h/v"
