"""AgentOptions: how the agents of a job meet, and when a job goes on or ends."""

import dataclasses

from lingvo_gshard.core import Options, UserError, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgentOptions(Options):
    """The hosts of a job, and what happens if some of them fail."""

    max_hosts: int = option(1, "Hosts that train if all are there.", minimum=1)
    min_hosts: int | None = option(
        None,
        "Fewest hosts that train; by default `max_hosts`: the job waits for lost hosts.",
        minimum=1,
    )
    other_mesh: tuple[str, ...] = option(
        (),
        "A mesh for fewer hosts, such as data=6,model=2, besides those that follow from the "
        "command's mesh; may be repeated.",
    )
    meeting_place: str | None = option(
        None,
        "Directory or bucket that all hosts reach, where agents meet. Default: agents in the "
        "command's `logdir`.",
    )
    max_restarts: int = option(
        20, "The job ends if workers had to be started again more often within an hour.", minimum=0
    )
    max_host_failures: int = option(
        3,
        "A host whose worker failed so often within an hour is left out while enough others are "
        "there.",
        minimum=1,
    )
    check_after_failures: int = option(
        2,
        "A host that failed so often within an hour runs gshard-doctor before it takes part again; "
        "0: never.",
        minimum=0,
    )
    gather_seconds: float = option(
        60.0, "Longest wait for all `max_hosts` when the job starts.", minimum=0
    )
    regather_seconds: float = option(
        10.0, "Longest wait for lost hosts before the others go on without them.", minimum=0
    )
    join_seconds: float = option(
        1800.0, "The job ends if for so long fewer than `min_hosts` are there.", above=0
    )
    grow_seconds: float = option(
        300.0,
        "A host that returns takes part when the workers have run for so long; they save first.",
        minimum=0,
    )
    beat_seconds: float = option(
        1.0, "Seconds between two signs of life of an agent.", above=0, maximum=60
    )
    lost_seconds: float = option(
        20.0, "A host without a sign of life for so long is lost.", above=0
    )
    stop_seconds: float = option(
        120.0, "Longest wait for workers to end when one of them has ended.", above=0
    )
    start_seconds: float = option(
        3600.0, "A worker that ends no step for so long after its start hangs.", above=0
    )
    spare: bool = option(
        True,
        "Whether each host keeps a second process, which has loaded the libraries and becomes the "
        "next worker. It needs up to 1 GiB, and saves seconds of each restart.",
    )
    snapshot_folder: str = option(
        "/dev/shm", "Folder in memory for snapshots, with `run.snapshot_every_steps`."
    )
    snapshot_copies: int = option(
        1,
        "Other hosts that keep a copy of each host's part of a snapshot. Each copy needs memory "
        "for two parts of a host.",
        minimum=1,
    )
    port: int = option(
        0, "Port where workers meet, on the first host of each round; 0: a free one.", minimum=0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_hosts is not None and self.min_hosts > self.max_hosts:
            raise UserError(
                f"`min_hosts={self.min_hosts}` is more than `max_hosts={self.max_hosts}`"
            )
        if self.lost_seconds < 3 * self.beat_seconds:
            raise UserError(
                f"`lost_seconds={self.lost_seconds:g}` is too short: at least 3 times "
                f"`beat_seconds={self.beat_seconds:g}` is expected"
            )

    @property
    def fewest(self) -> int:
        """Fewest hosts that train."""
        return self.max_hosts if self.min_hosts is None else self.min_hosts


@dataclasses.dataclass(frozen=True, kw_only=True)
class HostOptions(Options):
    """Who a host is to the other hosts of its job."""

    host: str | None = option(
        None, "Name of this host, different from all others; by default Slurm's or the machine's."
    )
    address: str | None = option(
        None, "Address where the other hosts reach this one; by default its name."
    )
    rack: str | None = option(
        None,
        "What fails together with this host, such as its rack: copies of snapshots are in other "
        "racks where there are some. Default: the switch that Slurm names.",
    )
    alive_file: str | None = option(
        None, "File that the agent touches with each sign of life, for a probe."
    )
