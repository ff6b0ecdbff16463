# tests: sharding/strategies.py
"""Tests that one file can add a base strategy with a new mesh axis."""

import numpy as np
import pytest

from lingvo_gshard.sharding import Mesh, einsum, strategies
from tests.sharding import compiled

MESH = "rack=2,model=2"


@pytest.fixture(autouse=True)
def rack(monkeypatch):
    monkeypatch.setattr(strategies, "_bases", dict(strategies._bases))
    strategies.register("rack", "activations: B,G->rack | H,M->rack")


def test_a_strategy_with_a_new_axis_combines_with_others():
    strategy = strategies.get("tensor_rack", Mesh.parse(MESH))
    assert strategy.name == "tensor_rack"
    assert strategy.activations == {
        "B": ("rack",),
        "G": ("rack",),
        "M": ("rack",),
        "H": ("rack", "model"),
        "N": ("model",),
        "V": ("model",),
    }
    assert strategy.axes == {"rack", "model"}


def test_axes_without_a_rank_keep_mesh_order():
    strategies.register("shelf", "activations: B->shelf")
    for mesh in ("shelf=2,rack=2,data=2", "rack=2,data=2,shelf=2"):
        rows = strategies.get("data_rack_shelf", Mesh.parse(mesh)).activations["B"]
        first, second = (a for a in Mesh.parse(mesh).names if a != "data")
        assert rows == (first, second, "data")


def test_a_product_is_split_over_the_new_axis():
    x, w = np.ones([4, 2, 4], np.float32), np.ones([4, 8], np.float32)
    ran = compiled.run(
        lambda x, w: einsum("BLM,MH->BLH", x, w), x, w, mesh=MESH, strategy="rack_tensor"
    )
    np.testing.assert_array_equal(ran.results[0], np.full([4, 2, 8], 4.0))


def test_rejects_a_mesh_without_the_axis():
    message = (
        "`strategy=rack` needs axis 'rack', which `mesh=rock=2` lacks. Did you mean `mesh=rack=2`?"
    )
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        strategies.get("rack", Mesh.parse("rock=2"))


@pytest.mark.parametrize(
    ("name", "table", "message"),
    [
        ("data", "B->data", "'data' is already a strategy"),
        ("two_words", "B->data", "'two_words' is not made of letters and digits alone"),
        ("none", "B", "'B' has no rule such as H->model"),
    ],
)
def test_errors_of_registration_name_the_cause(name, table, message):
    with pytest.raises(ValueError, match=message):
        strategies.register(name, table)
