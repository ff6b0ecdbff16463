"""Submits a job to Kubernetes: a JobSet with a pod for each host, which runs its agent."""

from __future__ import annotations

import base64
import dataclasses
import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import jinja2
import yaml
from absl import flags

from lingvo_gshard.core import Options, UserError, objects, option
from lingvo_gshard.tools.console import output
from lingvo_gshard.tools.flags.definitions import maker
from lingvo_gshard.tools.flags.options import DRY_RUN, option_flags, read_options, spell_options
from lingvo_gshard.tools.launch.command import read_command
from lingvo_gshard.wings.agents.options import AgentOptions, HostOptions
from lingvo_gshard.wings.cluster.rendezvous import SECRET

_KEY = "secret"
_GROUP = "hosts"
# Characters of a label of DNS (RFC 1035), as names of pods are, and of other names (RFC 1123).
_LONGEST_LABEL, _LONGEST_NAME = 63, 253
# The texts that Kubernetes accepts, by option, with their longest length.
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_VALUE = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
_SMALL = "lowercase letters, digits and -"
_ACCEPTED = {
    "image": (r"\S+", None, "a name without spaces"),
    "job_name": (rf"(?=[a-z]){_LABEL}", _LONGEST_LABEL, f"{_SMALL}, a letter first"),
    "namespace": (_LABEL, _LONGEST_LABEL, _SMALL),
    "volume": (_SUBDOMAIN, _LONGEST_NAME, f"{_SMALL} and ."),
    "service_account": (_SUBDOMAIN, _LONGEST_NAME, f"{_SMALL} and ."),
    "mount": (r"/(?!dev/shm/*$)[^:]*", None, "an absolute path without :, not that of memory"),
    "tpu_accelerator": (_VALUE, _LONGEST_LABEL, "letters, digits, -, _ and ."),
    "tpu_topology": (r"\d+(x\d+){1,2}", _LONGEST_LABEL, "chips along each axis, such as 4x4"),
}
# The file that an agent touches, for the probe.
_ALIVE = "/tmp/gshard-agent"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodOptions(Options):
    """Options of the pods of a job."""

    image: str | None = option(None, "Image with lingvo_gshard; necessary for Kubernetes.")
    job_name: str = option("gshard", "Name of the job's object, and of its secret.")
    namespace: str | None = option(None, "Namespace; by default kubectl's.")
    gpus: int = option(0, "NVIDIA GPUs of each host.", minimum=0)
    volume: str | None = option(None, "Persistent volume claim that all hosts mount at `mount`.")
    mount: str = option("/runs", "Where the volume is mounted.")
    service_account: str | None = option(None, "Service account of the pods: it may use a bucket.")
    memory_gib: int = option(16, "Shared memory of a pod, in GiB.", minimum=1)
    save_seconds: int = option(180, "Time that a worker has to save when it must end.", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, (pattern, longest, expected) in _ACCEPTED.items():
            given = getattr(self, name, None)
            if given is None:
                continue
            if not re.fullmatch(pattern, given):
                raise UserError(f"`{name}={given}`: Kubernetes accepts {expected}")
            if longest is not None and len(given) > longest:
                raise UserError(f"`{name}={given}`: Kubernetes accepts {longest} characters")


@dataclasses.dataclass(frozen=True, kw_only=True)
class KubernetesOptions(PodOptions):
    """Options of a job on Kubernetes."""

    tpu_accelerator: str | None = option(None, "Kind of TPU, as GKE labels nodes: tpu-v6e-slice.")
    tpu_topology: str | None = option(None, "Topology of a TPU slice, such as 4x4.")
    tpu_chips: int = option(4, "TPU chips of each host.", minimum=1)
    slices: int = option(1, "TPU slices of the job; they share `max_hosts` equally.", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.tpu_accelerator is None) != (self.tpu_topology is None):
            raise UserError(
                f"`tpu_accelerator={self.tpu_accelerator}` and `tpu_topology={self.tpu_topology}` "
                "belong together; give both or none"
            )
        if self.gpus and self.tpu_accelerator:
            raise UserError(f"`gpus={self.gpus}` and `tpu_accelerator`: hosts have one of them")


define_flags = maker(
    **option_flags(KubernetesOptions()),
    **option_flags(AgentOptions()),
    dry_run=DRY_RUN,
    json=output.json_flag("the manifest"),
)


def run(values: flags.FlagValues, console: output.Console, words: Sequence[str]) -> int:
    """Runs the subcommand and returns the exit code. Raises UserError for a mistake."""
    command, options = read_command(values, words)
    kubernetes = read_options(values, KubernetesOptions)
    command.meshes(options)
    job = job_set(kubernetes, options, words)
    output.write_json(values.json, job)
    if values.dry_run:
        console.say(as_yaml(job).rstrip())
        return 0
    secret = _secret(kubernetes, os.environ.get(SECRET) or secrets.token_hex(16))
    kubectl = apply(kubernetes, f"{as_yaml(secret)}---\n{as_yaml(job)}")
    if kubectl is None:
        return 1
    label = f"jobset.sigs.k8s.io/jobset-name={kubernetes.job_name}"
    logs = ["logs", "--follow", "--prefix", "--tail=-1", f"--selector={label}"]
    console.say(f"Follow the log:\n  {shlex.join([*kubectl, *logs])}")
    return 0


def apply(pods: PodOptions, manifest: str) -> list[str] | None:
    """Applies a manifest. Returns the beginning of further commands; None if it was refused."""
    if shutil.which("kubectl") is None:
        raise UserError("kubectl is not there: submit from a machine that has it")
    kubectl = ["kubectl", *([f"--namespace={pods.namespace}"] if pods.namespace else [])]
    applied = subprocess.run([*kubectl, "apply", "-f", "-"], input=manifest, text=True, check=False)
    return None if applied.returncode else kubectl


def job_set(
    kubernetes: KubernetesOptions, options: AgentOptions, words: Sequence[str]
) -> dict[str, Any]:
    """Returns the manifest of a job. Raises UserError if the options do not go together."""
    if kubernetes.image is None:
        raise UserError("--image is missing: the image that the pods run")
    if options.max_hosts % kubernetes.slices:
        raise UserError(
            f"`slices={kubernetes.slices}` cannot share `max_hosts={options.max_hosts}` equally"
        )
    hosts = options.max_hosts // kubernetes.slices
    added = f"-{_GROUP}-{kubernetes.slices - 1}-{hosts - 1}-12345"
    most = _LONGEST_LABEL - len(added)
    if len(kubernetes.job_name) > most:
        raise UserError(
            f"`job_name={kubernetes.job_name}`: {most} characters are the most, since the names of "
            f"pods end with the likes of {added}"
        )
    return fill_template(
        "job_set.yaml",
        kubernetes,
        hosts=hosts,
        group=_GROUP,
        command=_command(kubernetes, options, words),
        alive=_ALIVE,
        # Stopping a worker may take so long.
        limit=int(options.stop_seconds + options.lost_seconds),
        secret=SECRET,
        key=_KEY,
    )


def fill_template(name: str, pods: PodOptions, **fields: Any) -> dict[str, Any]:
    """Returns the manifest that a template beside this file becomes with options and fields."""
    environment = jinja2.Environment(
        trim_blocks=True, undefined=jinja2.StrictUndefined, finalize=_in_line
    )
    template = environment.from_string(objects.text_beside(__file__, name))
    return yaml.safe_load(template.render(dataclasses.asdict(pods), **fields))


def _command(
    kubernetes: KubernetesOptions, options: AgentOptions, words: Sequence[str]
) -> list[str]:
    """Returns the command of a pod, as a manifest spells it."""
    host = "$(JOB)-$(INDEX)"
    own = HostOptions(host=host, address=f"{host}.{kubernetes.job_name}", alive_file=_ALIVE)
    if kubernetes.tpu_topology is not None:
        # The chips of a slice start on all hosts together: no host can check its own.
        options = dataclasses.replace(options, check_after_failures=0)
    # Kubernetes replaces $(NAME), and $$ by $.
    given = (word.replace("$", "$$") for word in [*spell_options(options), "--", *words])
    return ["gshard-launch", "agent", *spell_options(own), *given]


def _secret(kubernetes: KubernetesOptions, secret: str) -> dict[str, Any]:
    metadata = {"name": kubernetes.job_name}
    if kubernetes.namespace:
        metadata["namespace"] = kubernetes.namespace
    data = {_KEY: base64.b64encode(secret.encode()).decode()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}


def as_yaml(value: object) -> str:
    """Returns plain data as YAML in ASCII, with all text in quotes.

    Text without quotes would depend on the reader: 1e3 is a number to some, and text to others.
    """
    return yaml.dump(value, Dumper=_Quoting, sort_keys=False, width=math.inf)


def _in_line(value: object) -> str:
    """Returns plain data as YAML within a line of the template."""
    return yaml.dump([value], Dumper=_Quoting, default_flow_style=True, width=math.inf)[1:-2]


class _Quoting(yaml.SafeDumper):
    """Writes text in quotes, and a value that occurs twice as often."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Quoting.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)
