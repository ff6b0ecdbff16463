# tests: tools/launch/slurm.py, tools/launch/kubernetes.py, tools/launch/tpu_vm.py
"""Fuzzes the scripts and manifests of gshard-launch: every word arrives unchanged, or is refused.

The oracles are a real shell, a real reader of YAML, and two readers that this file has from others:
sbatch's of #SBATCH lines (Slurm 22.05, src/common/slurm_opt.c), which the last test checks, and
Kubernetes' of $(NAME) (third_party/forked/golang/expansion/expand.go).
"""

import pathlib
import shlex
import subprocess

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools import launch
from lingvo_gshard.tools.launch import slurm, tpu_vm
from lingvo_gshard.tools.launch.kubernetes import KubernetesOptions, as_yaml, job_set
from lingvo_gshard.tools.launch.slurm import SlurmOptions
from lingvo_gshard.wings.agents.options import AgentOptions
from tests.tools.launch import slurm_cluster

ODD = (
    *(
        "'",
        '"',
        "\\",
        "#",
        " ",
        "  ",
        "\t",
        "\n",
        "\r\n",
        "$",
        "$$",
        "$(INDEX)",
        "$(JOB",
        "${HOME}",
    ),
    *(
        "`id`",
        "$(id)",
        ";",
        "&",
        "|",
        "!!",
        "*",
        "~",
        "%",
        "%j",
        "%%",
        "%5j",
        "{x}",
        "{}",
        "--",
        "-",
    ),
    *(
        "😀",
        "ü",
        "\u2028",
        "\x85",
        "\ufeff",
        "\x1b",
        "\x7f",
        "yes",
        "null",
        "1e3",
        "0o7",
        ": ",
        "- ",
    ),
    *("&a", "*a", "!x", "$(GSHARD_CLUSTER_SECRET)", "#SBATCH --x", "\n#SBATCH --wrap=id\n", "EOF"),
)
TEXTS = st.lists(
    st.one_of(st.sampled_from(ODD), st.text(st.characters(exclude_characters="\0"), max_size=4)),
    max_size=6,
).map("".join)
WORDS = st.lists(TEXTS, max_size=4)
FEW, MANY = 60, 1500
FAST = settings(max_examples=FEW, deadline=None, derandomize=True, database=None)
SLOW = settings(
    max_examples=MANY,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
# Prints its arguments, each with a NUL behind it.
ECHO = "#!/bin/bash\nprintf '%s\\0' \"$@\"\n"


def is_utf8(text: str) -> bool:
    return text == text.encode(errors="replace").decode()


def sbatch_arguments(line: str) -> list[str]:
    """Returns the arguments of an #SBATCH line as sbatch reads it."""
    found, place = [], 0
    while True:
        while place < len(line) and line[place] in " \t\v\f\r":
            place += 1
        if place == len(line):
            return found
        assert line[place] != ":"
        argument, quote, escaped = "", "", False
        while place < len(line) and (quote or line[place] not in " \t\v\f\r"):
            one = line[place]
            place += 1
            if escaped:
                argument, escaped = argument + one, False
            elif one == "\\":
                escaped = True
            elif quote and one == quote:
                quote = ""
            elif not quote and one in "'\"":
                quote = one
            elif not quote and one == "#":
                return [*found, argument]
            else:
                argument += one
        assert not quote
        found.append(argument)


def sbatch_settings(script: str) -> dict[str, str]:
    """Returns the settings in a script, up to its first command."""
    found = {}
    for line in script.split("\n"):
        if line.strip() and not line.startswith("#"):
            return found
        if line.startswith("#SBATCH"):
            (argument,) = sbatch_arguments(line.removeprefix("#SBATCH"))
            name, _, value = argument.partition("=")
            found[name] = value
    raise AssertionError("no command")


def expanded(text: str, known: dict[str, str]) -> str:
    """Returns a word of a command as Kubernetes expands it."""
    found, place = "", 0
    while place < len(text):
        if text[place] != "$" or place + 1 == len(text):
            found += text[place]
        elif text[place + 1] == "$":
            found, place = found + "$", place + 1
        elif text[place + 1] == "(" and (end := text.find(")", place)) >= 0:
            name = text[place + 2 : end]
            found, place = found + known.get(name, f"$({name})"), end
        else:
            found, place = found + "$" + text[place + 1], place + 1
        place += 1
    return found


def echoed(text: str, name: str, folder: pathlib.Path) -> list[str]:
    """Returns the arguments that a script gives to a program, which a stand-in prints."""
    program = folder / name
    if not program.exists():
        program.write_text(ECHO)
        program.chmod(0o755)
    path = folder / "script"
    path.write_bytes(text.encode())
    subprocess.run(["bash", "-n", path], check=True)
    done = subprocess.run(
        ["bash", path], env={"PATH": f"{folder}:/usr/bin:/bin"}, capture_output=True, check=False
    )
    assert not done.stderr
    return done.stdout.decode().split("\0")[:-1]


def check_slurm(folder: pathlib.Path, where: str, values: list[str], words: list[str]) -> None:
    job, partition, comment = values
    options = AgentOptions(max_hosts=2, meeting_place=where)
    chosen = SlurmOptions(job_name=job, partition=partition, sbatch=(f"--comment={comment}",))
    try:
        text = slurm.script(chosen, options, words, where)
    except UserError as error:
        is_bad = any(not one.isprintable() for one in (where, *values))
        is_name = partition.split() == [partition]
        assert (is_bad or "\\" in where or not is_name) and "\n" not in str(error)
        return
    found = sbatch_settings(text)
    assert {name: found[f"--{name}"] for name in ("job-name", "partition", "comment")} == {
        "job-name": job,
        "partition": partition,
        "comment": comment,
    }
    log, _, name = found["--output"].rpartition("/")
    # A percent sign that is no pattern stands twice.
    assert (log.replace("%%", "\0").count("%"), name) == (0, "job-%j.log")
    assert log.replace("%%", "%") == where
    given = echoed(text, "srun", folder)
    assert given[given.index("--", 5) + 1 :] == words
    assert f"--meeting_place={where}" in given


def check_kubernetes(where: str, words: list[str], image: str) -> None:
    options = AgentOptions(max_hosts=2, meeting_place=where)
    if not image or any(map(str.isspace, image)):
        with pytest.raises(UserError, match="accepts a name without spaces"):
            KubernetesOptions(image=image)
        image = "registry/me/gshard:1"
    made = job_set(KubernetesOptions(image=image), options, words)
    text = as_yaml(made)
    assert text.isascii() and yaml.safe_load(text) == made
    (group,) = made["spec"]["replicatedJobs"]
    (container,) = group["template"]["spec"]["template"]["spec"]["containers"]
    known = {"JOB": "gshard-hosts-0", "INDEX": "1", "GSHARD_CLUSTER_SECRET": "hush"}
    command = [expanded(word, known) for word in container["command"]]
    assert container["image"] == image
    assert command[command.index("--") + 1 :] == words
    assert f"--meeting_place={where}" in command and "--host=gshard-hosts-0-1" in command


def check_tpu_vm(folder: pathlib.Path, words: list[str], place: str) -> None:
    options = AgentOptions(max_hosts=2, meeting_place=f"gs://b/{place}", check_after_failures=0)
    tpu = tpu_vm.TpuVmOptions(zone="z", accelerator_type="v6e-8", runtime_version="r")
    steps = tpu_vm.commands(tpu, options, words)
    # gcloud hands the command to the shell of each host.
    (command,) = [one for one in steps["train"] if one.startswith("--command=")]
    given = echoed(command.removeprefix("--command="), "gshard-launch", folder)
    assert given[given.index("--") + 1 :] == words and f"--meeting_place=gs://b/{place}" in given
    assert shlex.split(shlex.join(steps["train"])) == steps["train"]


def check_all(folder: pathlib.Path, where: str, values: list[str], words: list[str]) -> None:
    texts = [where, *values, *words]
    if not all(map(is_utf8, texts)):
        with pytest.raises(UserError, match="not UTF-8"):
            launch.main(["gshard-launch", "slurm", "--dry_run", *texts])
        return
    words = ["gshard-train", *words]
    check_slurm(folder, f"/runs/{where}", values, words)
    check_kubernetes(f"/runs/{where}", words, values[0])
    check_tpu_vm(folder, words, where)


EXAMPLES = (
    ("a b", ["a b", "it's", "#x"], ["$(INDEX)", "$(GSHARD_CLUSTER_SECRET)", "$$"]),
    ("it's", ['"', "\\", "a\\ b"], ["😀", "", "--", "-"]),
    ("100%j", [":", " ", "%j"], ["\n#SBATCH --wrap=id", "\r\n", "'"]),
    ("a\\b", ["x", "x", "x"], []),
    ("line\nid", ["x", "x\nid", "x"], ["\udc80"]),
)


def fuzzed(test):
    for where, values, words in EXAMPLES:
        test = example(where=where, values=values, words=words)(test)
    return given(where=TEXTS, values=st.lists(TEXTS, min_size=3, max_size=3), words=WORDS)(test)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("scripts")


@FAST
@fuzzed
def test_words_arrive_unchanged(folder, where, values, words):
    check_all(folder, where, values, words)


@pytest.mark.slow
@SLOW
@fuzzed
def test_many_words_arrive_unchanged(folder, where, values, words):
    check_all(folder, where, values, words)


def test_the_reader_of_commands_is_that_of_kubernetes():
    """Cases of expand_test.go."""
    known = {"VAR_A": "A", "VAR_B": "B", "VAR_REF": "$(VAR_A)", "VAR_EMPTY": ""}
    for text, expected in {
        "$(VAR_A)": "A",
        "___$(VAR_B)___": "___B___",
        "$(VAR_REF)": "$(VAR_A)",
        "$$(VAR_A)": "$(VAR_A)",
        "$$$(VAR_A)": "$A",
        "$$$$(VAR_A)": "$$(VAR_A)",
        "foo$(VAR_EMPTY)bar": "foobar",
        "$(VAR_DNE)": "$(VAR_DNE)",
        "$(VAR_A": "$(VAR_A",
        "$VAR_A)": "$VAR_A)",
        "f000-$VAR_A": "f000-$VAR_A",
        "foo\\$(VAR_A)bar": "foo\\Abar",
        "$?_boo_$!": "$?_boo_$!",
        "$": "$",
    }.items():
        assert expanded(text, known) == expected, text


@pytest.mark.slow
def test_a_real_sbatch_reads_the_lines(tmp_path):
    """The log of a job is where it should be, whatever the folder's name is."""
    problem = slurm_cluster.problem()
    if problem:
        pytest.skip(problem)
    (tmp_path / "cluster").mkdir()
    names = ["a b", "it's", 'q"q', "a#b", "a%j", "100%%", "$(id)", "ü😀", "~", ":c", "{1}[2]*;&|!"]
    with slurm_cluster.running(tmp_path / "cluster") as cluster:
        for name in names:
            place = tmp_path / name
            place.mkdir()
            chosen = SlurmOptions(job_name=f"n {name}", sbatch=(f"comment=c {name}",))
            text = slurm.script(chosen, AgentOptions(max_hosts=1), ["true"], str(place))
            # The job itself needs no agents here.
            text = text.partition("\n\n")[0] + "\n\nexit 0\n"
            (place / "job.sh").write_bytes(text.encode())
            job = cluster.run("sbatch", "--parsable", "--wait", str(place / "job.sh"))
            assert (place / f"job-{job}.log").exists(), name
            shown = cluster.run("scontrol", "show", "job", job)
            assert f"JobName=n {name}\n" in shown and f"Comment=c {name}" in shown
