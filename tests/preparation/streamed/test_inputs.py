"""Tests what positions in a stream are checked against, without a data set."""

import types

from lingvo_gshard.wings.preparation.streamed.inputs import StreamedLanguageModelInput


def test_positions_of_earlier_versions_are_of_the_same_stream():
    """Expects the digest that the version before the classes moved to this folder had."""
    params = StreamedLanguageModelInput.params()
    params.dataset.set(path="json")
    input_ = params.instantiate()
    vars(input_)["vocabulary"] = types.SimpleNamespace(bos_id=1)
    assert input_._identity(0) == "9355896973dd716a"
