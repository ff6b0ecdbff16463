"""Tests where the user's cache folder is."""

from lingvo_gshard.core import user_cache


def test_the_folder_follows_the_environment_and_the_argument(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert user_cache.directory("vocabularies") == "/x/lingvo_gshard/vocabularies"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert user_cache.directory("vocabularies") == "/h/.cache/lingvo_gshard/vocabularies"
    assert user_cache.directory("vocabularies", "~/v") == "/h/v"
