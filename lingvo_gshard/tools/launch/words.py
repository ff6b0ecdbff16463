"""Checks words that go into scripts and manifests."""

from lingvo_gshard.core import UserError


def check_utf8(text: str) -> str:
    """Returns a text that scripts and manifests can hold.

    Raises:
      UserError: it is not UTF-8. Python reads such bytes of a command line as lone surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{text!r} is not UTF-8, as all words of gshard-launch must be") from None
    return text
