"""Runs a job on a Ray cluster: an actor of Ray on each host, which is the host's agent."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import secrets
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from absl import flags

from lingvo_gshard.core import EXIT_CODES, UserError, declared, is_bucket, option, signals
from lingvo_gshard.tools.console import output, warn
from lingvo_gshard.tools.flags.definitions import maker
from lingvo_gshard.tools.flags.options import DRY_RUN, option_flags, read_options, spell_options
from lingvo_gshard.tools.launch.agent import job_of, run_agent
from lingvo_gshard.tools.launch.command import WorkerCommand, read_command
from lingvo_gshard.tools.launch.kubernetes import PodOptions, apply, as_yaml, fill_template
from lingvo_gshard.wings.agents.agent import Host
from lingvo_gshard.wings.agents.options import AgentOptions
from lingvo_gshard.wings.agents.ray_meeting import Messages, RayMeeting
from lingvo_gshard.wings.cluster.rendezvous import SECRET
from lingvo_gshard.wings.services.run_lock import JOB

_POLL_SECONDS, _CONNECT_SECONDS = 1.0, 10.0
# After the end of a job, its agents follow within some signs of life. Lost ones never do.
_END_SECONDS = 10.0
# `ray job stop` kills a job after so many seconds, by default 3.
_STOP_SECONDS = "RAY_JOB_STOP_WAIT_TIME_S"
_IN_A_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
# KubeRay's ray-operator/controllers/ray/utils/constant.go, MaxRayJobNameLength.
_LONGEST_NAME = 47


@dataclasses.dataclass(frozen=True, kw_only=True)
class RayOptions(PodOptions):
    """Hosts of a Ray cluster, and the pods of KubeRay."""

    image: str | None = option(
        None, "Image with lingvo_gshard[ray]. With it, the job is a RayJob of KubeRay."
    )
    address: str | None = option(
        None, "HOST:PORT of the cluster's head; by default RAY_ADDRESS or this machine's cluster."
    )
    placement: str = option(
        "STRICT_SPREAD",
        "How Ray places hosts on nodes. STRICT_SPREAD: each on a node of its own.",
        choices=("STRICT_SPREAD", "SPREAD", "PACK", "STRICT_PACK"),
    )
    cpus: int = option(1, "CPUs that Ray reserves for each host.", minimum=0)
    resource: tuple[str, ...] = option((), "Another resource of each host: TPU=4; may be repeated.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.bundle:
            raise UserError(f"`cpus={self.cpus}`: a host needs a CPU, a GPU or another resource")
        for name in set(declared(PodOptions)) - {"gpus", "save_seconds"}:
            given = getattr(self, name)
            if self.image is None and given != declared(PodOptions)[name].default:
                raise UserError(f"`{name}={given}` is for pods, which need `image`")

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of Ray for each host, by name. Raises UserError for a wrong one."""
        found = {"CPU": float(self.cpus), "GPU": float(self.gpus)}
        for given in self.resource:
            name, _, amount = given.partition("=")
            if not amount.isdecimal() or name in ("", *found):
                raise UserError(f"`resource={given}`: NAME=AMOUNT is expected, such as TPU=4")
            found[name] = float(amount)
        return {name: amount for name, amount in found.items() if amount}


# Runs an agent, `run_agent` with the arguments that all hosts share.
_RunAgent: TypeAlias = "functools.partial[int]"
_AGENT = [name for name in declared(AgentOptions) if name != "meeting_place"]
define_flags = maker(
    **option_flags(RayOptions()),
    **option_flags(AgentOptions(), _AGENT),
    dry_run=DRY_RUN,
    json=output.json_flag("what would be submitted, or the exit code"),
)


def run(values: flags.FlagValues, console: output.Console, words: Sequence[str]) -> int:
    """Runs the subcommand and returns the exit code. Raises UserError for a mistake."""
    logdir = WorkerCommand(words).option("logdir") or ""
    if not is_bucket(logdir) and not os.path.isabs(logdir):
        raise UserError(
            f"--logdir={logdir} in the command: Ray starts processes in other folders, so that an "
            "absolute path that all hosts see is expected, or a bucket"
        )
    (command, options), hosts = read_command(values, words), read_options(values, RayOptions)
    meshes = command.meshes(options)
    if hosts.image is not None:
        manifest = ray_job(hosts, options, words)
        output.write_json(values.json, manifest)
        if not values.dry_run:
            return 1 if apply(hosts, as_yaml(manifest)) is None else 0
        console.say(as_yaml(manifest).rstrip())
        return 0
    if values.dry_run:
        environment = f"--runtime-env-json={_environment(hosts)}"
        submitted = ["ray", "job", "submit", environment, "--", *_own(hosts, options, words)]
        console.say(shlex.join(submitted))
        output.write_json(values.json, {"command": submitted})
        return 0
    code = _train(hosts, command, options, meshes)
    output.write_json(values.json, {"code": code})
    return code


def ray_job(hosts: RayOptions, options: AgentOptions, words: Sequence[str]) -> dict[str, Any]:
    """Returns the manifest of a job for KubeRay. Raises UserError if its name is too long."""
    if len(hosts.job_name) > _LONGEST_NAME:
        raise UserError(f"`job_name={hosts.job_name}`: KubeRay accepts {_LONGEST_NAME} characters")
    # KubeRay puts it into arguments of a pod, where Kubernetes replaces $(NAME), and $$ by $.
    entrypoint = shlex.join(_own(hosts, options, words)).replace("$", "$$")
    environment = _environment(hosts)
    return fill_template(
        "ray_job.yaml", hosts, hosts=options.max_hosts, entrypoint=entrypoint, env=environment
    )


def _own(hosts: RayOptions, options: AgentOptions, words: Sequence[str]) -> list[str]:
    """Returns the command that runs within the cluster."""
    defaults = {name: each.default for name, each in declared(PodOptions).items()}
    defaults |= {"gpus": hosts.gpus, "save_seconds": hosts.save_seconds}
    inside = dataclasses.replace(hosts, **defaults)
    given = spell_options(dataclasses.replace(options, meeting_place=None))
    return ["gshard-launch", "ray", *spell_options(inside), *given, "--", *words]


def _environment(hosts: RayOptions) -> str:
    """Returns Ray's runtime environment of a job, which gives workers the time to save."""
    return json.dumps({"env_vars": {_STOP_SECONDS: str(hosts.save_seconds)}})


def _train(
    hosts: RayOptions,
    command: WorkerCommand,
    options: AgentOptions,
    meshes: Mapping[int, str | None],
) -> int:
    """Runs a job on the cluster. Returns its exit code."""
    _connect(hosts.address)
    import ray
    from ray.util import scheduling_strategies as strategies

    seconds = int(os.environ.get(_STOP_SECONDS, 3))
    if _IN_A_JOB in os.environ and seconds < hosts.save_seconds:
        warn(
            f"Warning: `ray job stop` kills this job after {seconds} s, less than "
            f"`save_seconds={hosts.save_seconds}`: set {_STOP_SECONDS} as `dry_run` does"
        )
    with signals.StopRequest() as stop:
        stop.finishing = True
        group = _place(hosts, options, meshes, stop)
        if group is None:
            return EXIT_CODES[stop.requested or "SIGTERM"]
        count = group.bundle_count
        # Beside this process, whose end ends the job anyway.
        near = strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=True
        )
        actor = ray.remote(Messages).options(num_cpus=0, max_restarts=-1, scheduling_strategy=near)
        messages = actor.remote()
        others = {k: v for k, v in hosts.bundle.items() if k not in ("CPU", "GPU")}
        given = {"num_cpus": hosts.cpus, "num_gpus": hosts.gpus, "resources": others}
        places = [strategies.PlacementGroupSchedulingStrategy(group, k) for k in range(count)]
        agent = functools.partial(ray.remote(HostActor).options, max_restarts=-1, **given)
        actors = [agent(scheduling_strategy=place).remote() for place in places]
        fewer = dataclasses.replace(options, max_hosts=count, min_hosts=min(options.fewest, count))
        fitting = {n: mesh for n, mesh in meshes.items() if n <= count}
        variables = {SECRET: secrets.token_hex(16), JOB: secrets.token_hex(8)}
        job = job_of(str(options.meeting_place))
        start = functools.partial(
            run_agent, command, fewer, meshes=fitting, job=job, variables=variables
        )
        return _follow(actors, messages, start, stop)


def _connect(address: str | None) -> None:
    """Connects to a cluster. Raises UserError if none is there."""
    # Ray would hide lines that differ only by numbers, such as the lines of rounds.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    import ray

    given = address or os.environ.get("RAY_ADDRESS") or "auto"
    if given != "auto":
        host, _, port = given.rpartition(":")
        try:
            # Ray itself waits for minutes.
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        except (OSError, ValueError):
            raise UserError(
                f"`address={given}`: no Ray cluster answers there; HOST:PORT of its head is "
                "expected, as `ray start --head` prints it"
            ) from None
    try:
        ray.init(address=given, logging_level=logging.WARNING)
    except ConnectionError:
        raise UserError(
            "no Ray cluster is there: give `address=HOST:PORT` of its head, or start one on this "
            "machine with `ray start --head`"
        ) from None


def _place(
    hosts: RayOptions,
    options: AgentOptions,
    meshes: Mapping[int, str | None],
    stop: signals.StopRequest,
) -> Any:
    """Returns the placement group of the hosts; None if the job is asked to stop before.

    Raises:
      UserError: for a long time, Ray has had too few nodes.
    """
    from ray.util import placement_group, remove_placement_group

    began, wanted, told = time.monotonic(), options.max_hosts, ""
    group = placement_group([hosts.bundle] * wanted, hosts.placement)
    while not group.wait(_POLL_SECONDS):
        if stop.requested:
            return None
        found, there = _room(hosts)
        if found != told:
            warn(f"Waiting for {wanted} hosts: {found}")
            told = found
        waited = time.monotonic() - began
        if waited > options.join_seconds:
            raise UserError(
                f"`max_hosts={options.max_hosts}`: for {options.join_seconds:g} s, {wanted} hosts "
                f"were waited for. {found}. `ray start --address=HOST:PORT` adds a node"
            )
        fewer = max((n for n in meshes if n <= there), default=wanted)
        if waited > options.gather_seconds and fewer != wanted:
            remove_placement_group(group)
            wanted, told = fewer, ""
            group = placement_group([hosts.bundle] * wanted, hosts.placement)
    return group


def _room(hosts: RayOptions) -> tuple[str, int]:
    """Returns what living nodes have room for, in words, and as a number of hosts."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    each = [min(int(node.get(k, 0) // v) for k, v in hosts.bundle.items()) for node in nodes]
    most = {"STRICT_SPREAD": sum(map(bool, each)), "STRICT_PACK": max(each, default=0)}
    there = most.get(hosts.placement, sum(each))
    share = ", ".join(f"{name}={amount:g}" for name, amount in hosts.bundle.items())
    return f"Ray's living nodes, {len(nodes)}, have room for {there} hosts with {share}", there


class HostActor:
    """Ray's actor for one host. Its main thread runs the host's agent, which handles signals."""

    def __init__(self):
        self._code: int | None = None

    def run(self, place: int, messages: Any, start: _RunAgent) -> int:
        """Runs the agent of a place and returns its exit code. Another call returns the same."""
        import ray

        if self._code is None:
            own = ray.get_runtime_context().get_node_id()
            (address,) = (n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == own)
            host, meeting = Host(f"{address}-{place}", address), RayMeeting(messages)
            self._code = start(host=host, meeting=meeting)
        return self._code


def _follow(
    actors: Sequence[Any], messages: Any, start: _RunAgent, stop: signals.StopRequest
) -> int:
    """Runs agents until the job ends, again when Ray has replaced theirs. Returns the exit code."""
    import ray
    from ray import exceptions

    waiting, runs, codes = set(range(len(actors))), {}, set()
    while (waiting or runs) and not codes & {0, 1}:
        runs.update({actors[k].run.remote(k, messages, start): k for k in waiting})
        waiting = set()
        if stop.requested:
            messages.stop.remote()
        time.sleep(_POLL_SECONDS)
        for ended in ray.wait(list(runs), num_returns=len(runs), timeout=0)[0]:
            place = runs.pop(ended)
            try:
                codes.add(ray.get(ended))
            except exceptions.RayActorError:
                messages.forget.remote(place)
                waiting |= set() if stop.requested else {place}
            except exceptions.RayTaskError as error:
                raise error.cause from None
    if runs:
        ray.wait(list(runs), num_returns=len(runs), timeout=_END_SECONDS)
    final = codes & {0, 1}
    return max(final) if final else EXIT_CODES[stop.requested or "SIGTERM"]
