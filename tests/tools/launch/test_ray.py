# tests: tools/launch/ray.py, tools/launch/ray_job.yaml
"""Checks manifests against the published schema of RayJob, and mistakes, without a cluster.

rayjob_v1.json.xz is a part of the schema of ray-project/kuberay (Apache 2.0), without descriptions:
https://github.com/ray-project/kuberay/blob/feeaf72f/ray-operator/config/crd/bases/ray.io_rayjobs.yaml
It leaves out fields that no manifest of ours has: the state of a job, the pod that submits it,
further containers, affinities, and most fields of a cluster.
"""

import json
import lzma
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import yaml

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools import launch
from lingvo_gshard.tools.launch.kubernetes import as_yaml
from lingvo_gshard.tools.launch.ray import RayOptions, ray_job
from lingvo_gshard.wings.agents.options import AgentOptions
from tests.tools.launch.test_kubernetes import problems

_PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "clusters.md"
_SCHEMA = pathlib.Path(__file__).parent / "rayjob_v1.json.xz"
_WORDS = ["gshard-train", "--logdir=/runs/x", "--mesh=data=32", "--gin_param=a.b = 'c $d'"]


def manifest(**given) -> dict:
    agents = AgentOptions(max_hosts=4, min_hosts=2, meeting_place="/runs/x/agents")
    return ray_job(RayOptions(image="registry/me/gshard:1", **given), agents, _WORDS)


@pytest.mark.parametrize(
    "given",
    [{}, {"gpus": 8, "volume": "runs", "namespace": "team", "service_account": "writer"}],
)
def test_manifests_fit_the_published_schema(given):
    made, schema = manifest(**given), json.loads(lzma.decompress(_SCHEMA.read_bytes()))
    assert problems(made, schema) == []
    assert yaml.safe_load(as_yaml(made)) == made
    made["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replica"] = 3
    made["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0][
        "image"
    ] = 3
    found = problems(made, schema)
    assert len(found) == 2 and any("replica is unknown" in one for one in found)


def test_the_entry_point_of_a_manifest_is_the_same_command_within_the_cluster():
    spec = manifest(gpus=8, cpus=4, volume="runs", save_seconds=300, placement="SPREAD")["spec"]
    # Kubernetes replaces $$ by $ in arguments of a pod.
    assert "c $$d" in spec["entrypoint"]
    words = shlex.split(spec["entrypoint"].replace("$$", "$"))
    own = ["--gpus=8", "--save_seconds=300", "--placement=SPREAD", "--cpus=4"]
    own += ["--max_hosts=4", "--min_hosts=2"]
    assert words == ["gshard-launch", "ray", *own, "--", *_WORDS]
    environment = yaml.safe_load(spec["runtimeEnvYAML"])
    assert environment == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "300"}}
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert group["replicas"] == group["maxReplicas"] == 4
    assert group["rayStartParams"] == {"num-cpus": "4", "num-gpus": "8"}
    pod = group["template"]["spec"]
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 8}}


def test_a_dry_run_prints_the_command_that_submits(capsys):
    words = ["--address=10.0.0.1:6379", "--max_hosts=4", "--resource=TPU=4", "--save_seconds=60"]
    launch.main(["gshard-launch", "ray", *words, "--dry_run", "--", *_WORDS])
    found = shlex.split(capsys.readouterr().out)
    assert found[:3] == ["ray", "job", "submit"]
    assert json.loads(found[3].partition("=")[2])["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "60"}
    own = ["--save_seconds=60", "--address=10.0.0.1:6379", "--resource=TPU=4", "--max_hosts=4"]
    assert found[4:] == ["--", "gshard-launch", "ray", *own, "--", *_WORDS]


def test_the_page_shows_what_its_dry_run_prints(capsys):
    section = _PAGE.read_text(encoding="utf-8").replace("\\\n", "").partition("## Ray\n")[2]
    (given, shown) = re.search(
        r"^```bash\n(.*?)^```\n\n```\n(.*?)^```", section, re.M | re.S
    ).groups()
    launch.main(shlex.split(given))
    assert shlex.split(capsys.readouterr().out) == shlex.split(shown)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--volume=runs"], "`volume=runs` is for pods, which need `image`"),
        (["--memory_gib=8"], "`memory_gib=8` is for pods"),
        (["--image=x", "--job_name=Bad"], "`job_name=Bad`: Kubernetes accepts"),
        (["--image=x", f"--job_name={'a' * 48}"], "KubeRay accepts 47 characters"),
        (["--placement=PACKED"], "PACK"),
        (["--cpus=0"], "`cpus=0`: a host needs a CPU, a GPU or another resource"),
        (["--resource=TPU"], "`resource=TPU`: NAME=AMOUNT is expected, such as TPU=4"),
        (["--resource=CPU=4"], "`resource=CPU=4`: NAME=AMOUNT"),
        (["--resource=TPU=many"], "`resource=TPU=many`: NAME=AMOUNT"),
        (["--max_hosts=3"], "`mesh=data=32` has 32 devices, which 3 hosts cannot share"),
    ],
)
def test_mistakes_are_named(words, named):
    with pytest.raises((UserError, SystemExit), match=named):
        launch.main(["gshard-launch", "ray", *words, "--dry_run", "--", *_WORDS])


@pytest.mark.parametrize("logdir", ["--logdir=runs/x", "--steps=3"])
def test_the_log_directory_is_the_same_on_all_hosts(logdir):
    with pytest.raises(UserError, match="an absolute path that all hosts see is expected"):
        launch.main(["gshard-launch", "ray", "--dry_run", "--", "gshard-train", logdir])


def test_without_ray_the_extra_is_named():
    block = "import sys; sys.modules['ray'] = None; sys.argv = ['gshard-launch', *sys.argv[1:]]"
    run = "from lingvo_gshard.tools.console.entry import run_script; run_script()"
    command = [sys.executable, "-c", f"{block}; {run}", "ray", "--", *_WORDS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "the package ray is missing. To install it: " in done.stderr
    assert done.stderr.rstrip().endswith("[ray]'")
