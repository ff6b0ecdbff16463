# tests: /docs/release.py
"""Makes releases of a clone of this repository, whose package is a small one."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

pytest.importorskip("build", reason="the extra `test` brings build")

ROOT = pathlib.Path(__file__).resolve().parents[1]
COPIED = (
    *("CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md", "constraints.txt"),
    *("docs/install.md", "docs/release.py", "lingvo_gshard/core/version.py", "pyproject.toml"),
    *("setup.py", ".gitignore"),
)
NOTES = "## Unreleased\n\n### Added\n\n- A thing.\n\n## 0.1.0 - 2020-01-01\n\n### Added\n\n- All.\n"


class Clone:
    """A repository with the files that a release reads and writes."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        for name in COPIED:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, path / name)
        for folder in ("lingvo_gshard", "lingvo_gshard/core"):
            (path / folder / "__init__.py").touch()
        self.write("CHANGELOG.md", f"# Changelog\n\n{NOTES}")
        self.write("lingvo_gshard/core/version.py", 'VERSION = "0.1.0"\n')
        self.git("init", "--quiet", "--initial-branch=main")
        self.commit()

    def git(self, *arguments: str) -> str:
        return self._run(["git", *arguments]).stdout.strip()

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message=All")

    def read(self, path: str) -> str:
        return (self.path / path).read_text(encoding="utf-8")

    def write(self, path: str, text: str) -> None:
        (self.path / path).write_text(text, encoding="utf-8")

    def release(self, *arguments: str) -> tuple[int, str]:
        """Returns the exit code, and what the command says."""
        done = self._run([sys.executable, "-m", "docs.release", *arguments], check=False)
        return done.returncode, done.stdout + done.stderr

    def _run(self, command: list[str], check: bool = True) -> subprocess.CompletedProcess:
        names = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER")
                 for what in ("NAME", "EMAIL")}  # fmt: skip
        # The folders of the caller's path may hold this repository's docs/.
        others = [p for p in os.environ.get("PYTHONPATH", "").split(":") if p and p != str(ROOT)]
        environment = os.environ | names | {"PYTHONPATH": ":".join(others)}
        return subprocess.run(
            command, cwd=self.path, env=environment, check=check, capture_output=True, text=True
        )


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path / "clone")


def test_a_release_is_dated_built_checked_committed_and_tagged(clone):
    code, said = clone.release("0.2.0")
    assert code == 0, said
    assert "git push origin main v0.2.0" in said
    changelog = clone.read("CHANGELOG.md")
    assert re.search(
        r"## Unreleased\n\n## 0\.2\.0 - 20\d\d-\d\d-\d\d\n\n### Added\n\n- A thing\.\n\n"
        r"## 0\.1\.0 - 2020-01-01\n",
        changelog,
    )
    assert 'VERSION = "0.2.0"' in clone.read("lingvo_gshard/core/version.py")
    assert "\nversion: 0.2.0\n" in clone.read("CITATION.cff")
    page = clone.read("docs/install.md")
    assert "lingvo_gshard-0.2.0-py3" in page and "@v0.2.0'" in page and "0.1.0" not in page
    assert clone.git("status", "--porcelain") == ""
    assert clone.git("log", "--format=%s") == "Release 0.2.0\nAll"
    assert clone.git("rev-parse", "v0.2.0^{commit}") == clone.git("rev-parse", "HEAD")
    with zipfile.ZipFile(clone.path / "dist" / "lingvo_gshard-0.2.0-py3-none-any.whl") as wheel:
        assert b'"0.2.0"' in wheel.read("lingvo_gshard/core/version.py")
    with tarfile.open(clone.path / "dist" / "lingvo_gshard-0.2.0.tar.gz") as sdist:
        assert "lingvo_gshard-0.2.0/CHANGELOG.md" in sdist.getnames()
    # All notes are released.
    code, said = clone.release("0.3.0")
    assert code == 1 and "CHANGELOG.md has no notes below '## Unreleased'" in said


def test_a_section_that_is_dated_already_is_released_as_it_is(clone):
    clone.write(
        "CHANGELOG.md", f"# Changelog\n\n## Unreleased\n\n## 0.1.0{NOTES.split('0.1.0')[1]}"
    )
    clone.commit()
    before = clone.git("rev-parse", "HEAD")
    code, said = clone.release("0.1.0")
    assert code == 0, said
    assert clone.git("rev-parse", "v0.1.0^{commit}") == before == clone.git("rev-parse", "HEAD")
    assert "reset" not in said


@pytest.mark.parametrize(
    ("version", "error"),
    [
        ("2", "VERSION=2: expected three numbers, such as 0.2.0"),
        ("v0.2.0", "VERSION=v0.2.0: expected three numbers, such as 0.2.0"),
        ("0.0.9", "VERSION=0.0.9 is before 0.1.0, the version of the tree"),
    ],
)
def test_versions_that_cannot_be_released_are_refused(clone, version, error):
    assert clone.release(version) == (1, f"release: {error}\n")


def test_a_tag_is_used_once(clone):
    clone.git("tag", "v0.2.0")
    code, said = clone.release("0.2.0")
    assert code == 1 and "the tag v0.2.0 exists" in said


def test_a_tree_with_changes_is_refused(clone):
    clone.write("new.py", "")
    code, said = clone.release("0.2.0")
    assert code == 1 and "the tree has changes" in said and "new.py" in said


@pytest.mark.parametrize(
    ("path", "text", "error"),
    [
        ("CITATION.cff", "version: 0.0.7\n", "CITATION.cff has no 'version: 0.1.0'"),
        ("setup.py", "raise SystemExit('no')\n", "the package cannot be built"),
        (
            "setup.py",
            "from setuptools import setup\nsetup(name='lingvo_gshard', version='0.2.0', "
            "long_description='Text.', long_description_content_type='text/markdown')\n",
            "the installed wheel",
        ),
    ],
)
def test_a_failed_check_leaves_all_files_as_they_were(clone, path, text, error):
    clone.write(path, text)
    clone.commit()
    code, said = clone.release("0.2.0")
    assert code == 1 and error in said
    assert clone.git("status", "--porcelain") == "" and clone.git("tag") == ""
    assert "0.2.0" not in clone.read("CHANGELOG.md")


def test_without_a_version_the_command_explains(clone):
    code, said = clone.release()
    assert code == 2 and "make release VERSION=0.2.0" in said


def test_this_repository_names_one_version():
    """A release of this tree finds all places of the version, and the section of the changelog."""
    from docs import release
    from lingvo_gshard.core.version import VERSION

    assert release.current_version() == VERSION
    assert set(release.with_version(VERSION, "9.9.9")) == set(release.PLACES)
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert all(re.fullmatch(r"\d+\.\d+\.\d+ - \d{4}-\d\d-\d\d", each) for each in headings[1:])
    assert headings[1].split()[0] == VERSION
