"""Limits of the requests that the server takes. Commands read them without the extra `serve`."""

import dataclasses

from lingvo_gshard.core import Options, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits(Options):
    """Limits of the requests that the server takes.

    Each beam size and each kind of search needs programs of its own, which are compiled at their
    first use. Programs of the kinds that were used longest ago are dropped.

    Attributes:
      stops: largest number of strings that end a text, each of at most `stop_characters`. The
        server looks for all of them after every token.
    """

    queue_size: int = option(
        1024, "Most texts that wait or are decoded; beyond it: status 503.", minimum=1
    )
    most_body_bytes: int = option(
        2**20, "Most bytes of a request's body; beyond it: status 413.", minimum=1
    )
    most_beam_size: int = option(
        8, "Largest beam, and most texts drawn, that a request may ask for.", minimum=1
    )
    timeout: float = option(
        60.0,
        "Seconds after which a request is given up with status 504. It may ask for less.",
        minimum=0.001,
    )
    most_kinds: int = option(
        16,
        "Kinds of search (beam sizes, drawing, restrictions) whose programs are kept in memory.",
        minimum=1,
    )
    stuck_seconds: float = option(
        600.0,
        "Seconds after which decoding or compiling is stuck: /healthz fails, and the compiler's "
        "process is started anew.",
        minimum=1.0,
    )
    stops: int = 16
    stop_characters: int = 256
