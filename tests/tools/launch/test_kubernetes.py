"""Checks manifests against the published schema of JobSet, without a cluster.

jobset_v1alpha2.json.xz is the schema of kubernetes-sigs/jobset (Apache 2.0), without descriptions:
config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml at commit 08dfbdfd.
"""

import json
import lzma
import pathlib

import pytest
import yaml

from lingvo_gshard.core.errors import UserError
from lingvo_gshard.tools import launch
from lingvo_gshard.tools.launch.kubernetes import KubernetesOptions, as_yaml, job_set
from lingvo_gshard.wings.agents.options import AgentOptions

_SCHEMA = pathlib.Path(__file__).parent / "jobset_v1alpha2.json.xz"
_TYPES = {"object": dict, "array": list, "string": str, "boolean": bool, "integer": int}
_COMMAND = ["gshard-train", "--logdir=/runs/x", "--mesh=data=32", "--gin_param=a.b = 'c d'"]


def schema() -> dict:
    return json.loads(lzma.decompress(_SCHEMA.read_bytes()))


def problems(value, expected: dict, where: str = "") -> list[str]:
    """Returns what of a value the schema does not allow, fields that it does not know included."""
    if expected.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, int | str) else [f"{where}: {value!r}"]
    kind = expected.get("type", "object")
    if not isinstance(value, _TYPES[kind]) or isinstance(value, bool) != (kind == "boolean"):
        return [f"{where}: {value!r} is no {kind}"]
    found = [] if value in expected.get("enum", [value]) else [f"{where}: {value!r}"]
    if kind == "array":
        for index, one in enumerate(value):
            found += problems(one, expected["items"], f"{where}[{index}]")
    known, others = expected.get("properties", {}), expected.get("additionalProperties")
    if kind == "object" and (known or others):
        missing = set(expected.get("required", ())) - set(value)
        found += [f"{where}.{name} is missing" for name in missing]
        for name, one in value.items():
            place, inner = f"{where}.{name}", known.get(name, others)
            found += [f"{place} is unknown"] if inner is None else problems(one, inner, place)
    return found


def manifest(agents: AgentOptions | None = None, **given) -> dict:
    agents = agents or AgentOptions(max_hosts=4, min_hosts=2, meeting_place="/runs/x/agents")
    return job_set(KubernetesOptions(image="registry/me/gshard:1", **given), agents, _COMMAND)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"gpus": 8, "volume": "runs", "namespace": "team", "service_account": "writer"},
        {"tpu_accelerator": "tpu-v6e-slice", "tpu_topology": "4x4", "slices": 2},
    ],
)
def test_manifests_fit_the_published_schema(given):
    made = manifest(**given)
    assert problems(made, schema()) == []
    assert yaml.safe_load(as_yaml(made)) == made


def test_the_check_finds_mistakes():
    made = manifest()
    (group,) = made["spec"]["replicatedJobs"]
    group["template"]["spec"]["backofLimit"] = 3
    group["template"]["spec"]["template"]["spec"]["containers"][0]["image"] = 3
    del group["name"]
    found = problems(made, schema())
    assert len(found) == 3 and any("backofLimit is unknown" in one for one in found)


def test_hosts_of_slices_are_jobs_of_their_own():
    made = manifest(tpu_accelerator="tpu-v6e-slice", tpu_topology="4x4", slices=2)
    (group,) = made["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    assert (group["replicas"], job["parallelism"], job["completions"]) == (2, 2, 2)
    pod = job["template"]["spec"]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4"
    assert pod["containers"][0]["resources"] == {"limits": {"google.com/tpu": 4}}


def test_the_longest_names_are_accepted():
    made = manifest(job_name="a" * 47, volume="a.b-1", mount="/dev/shm2")
    assert made["metadata"]["name"] == "a" * 47


def test_no_secret_is_in_the_manifest(monkeypatch):
    monkeypatch.setenv("GSHARD_CLUSTER_SECRET", "hush")
    assert "hush" not in as_yaml(manifest())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "--image is missing"),
        (["--image=x", "--tpu_topology=4x4"], "belong together"),
        (["--image=x", "--slices=3", "--max_hosts=4"], "`slices=3` cannot share"),
        (["--image="], "`image=`: Kubernetes accepts a name without spaces"),
        (["--image=a b"], "`image=a b`: "),
        (["--image=x", "--job_name=Bad_Name"], "`job_name=Bad_Name`: .*letters, digits and -"),
        (["--image=x", "--job_name=1st"], "`job_name=1st`: .*a letter first"),
        (["--image=x", f"--job_name={'a' * 64}"], "accepts 63 characters"),
        # JobSet: name-hosts-0-3-abcde has at most 63 characters.
        (["--image=x", "--max_hosts=4", f"--job_name={'a' * 48}"], "47 characters are the most"),
        (["--image=x", "--namespace=a.b"], "`namespace=a.b`: "),
        (["--image=x", "--volume=my runs"], "`volume=my runs`: "),
        (["--image=x", "--service_account=me@x"], "`service_account=me@x`: "),
        (["--image=x", "--mount=runs"], "`mount=runs`: Kubernetes accepts an absolute path"),
        (["--image=x", "--mount=/dev/shm"], "not that of memory"),
        (["--image=x", "--tpu_topology=4by4", "--tpu_accelerator=v"], "`tpu_topology=4by4`: .*4x4"),
        (["--image=x", "--gpus=1", "--tpu_topology=4x4", "--tpu_accelerator=v"], "one of them"),
    ],
)
def test_mistakes_are_named(words, named):
    with pytest.raises(UserError, match=named):
        launch.main(["gshard-launch", "kubernetes", *words, "--dry_run", "--", *_COMMAND])
