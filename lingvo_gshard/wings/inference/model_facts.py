"""ModelFacts: what the host must know of a model to decode with it."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """The host's knowledge of a model; plain data, so that it can be stored with programs.

    Attributes:
      vocabulary_size: number of ids of the generated tokens.
      bos_id: id before the first token.
      end_ids: ids that end a text, ascending; one at least.
      has_source: whether the model translates a source, or else continues a text.
      most_source: the largest number of tokens of a source, EOS included; 0 without one.
      most_positions: the largest number of positions of a text, BOS included.
      most_steps: the largest number of tokens that one call of a program generates.
      pad_id: id that stands after the end of a text in programs that callers give padded batches.
      forced_ids: ids that follow `bos_id` in every text, such as the id of the target language.
      has_states: whether layers keep a state of each text, so that no beam is possible.
    """

    vocabulary_size: int
    bos_id: int
    end_ids: tuple[int, ...]
    has_source: bool
    most_source: int
    most_positions: int
    most_steps: int = 16
    pad_id: int = 0
    forced_ids: tuple[int, ...] = ()
    has_states: bool = False


def usual_tokens(source):
    """Returns the usual limit of new tokens for a number of source tokens, an int or a tensor."""
    return 2 * source + 10


# Stands where a text has no given token. Every id from 0 on may be a token.
NO_TOKEN = -1
