# tests: training/step/optimizer.py
"""Tests that matrices and tables decay, and biases and scales do not, wherever they are."""

import pytest

from benchmarks.parity.cases import CASES
from lingvo_gshard.core import initializers
from lingvo_gshard.core.layer import BIAS, SCALE, Layer
from lingvo_gshard.layers.stacks.transformer import TransformerStack
from lingvo_gshard.wings.fine_tuning.adapters import Adapters
from lingvo_gshard.wings.open_models.config import PublishedConfig
from lingvo_gshard.wings.open_models.families import FAMILIES
from lingvo_gshard.wings.published_layers.heads_norms import HeadsRMSNorm
from tests.layers.stacks import executions
from tests.training.optim.decayed import check_decay


@pytest.mark.parametrize(
    "execution", [executions.sequential(), executions.loop(), executions.pipeline(2)]
)
def test_a_stack(execution):
    stack = TransformerStack.params().set(
        num_layers=4, model_dim=8, num_heads=2, hidden_dim=8, moe_every=2, execution=execution
    )
    stack.moe.set(num_experts=2, shared_hidden_dim=4, shared_combination="learned")
    stack.moe.experts.use_bias = True
    stack.layer.self_attention.set(
        use_bias=True,
        relative_buckets=0 if "stages" in execution else 4,
        qk_norm=True,
        query_key_norm=HeadsRMSNorm.params(),
    )
    decays = check_decay(stack.instantiate(path="stack").variable_specs())
    ends = {path.rpartition(".")[2]: decay for path, decay in decays.items()}
    assert not ends["b_query"] and not ends["scale"] and ends["w_mix"] and ends["w_query"]


def _first_of_each_family() -> list:
    """Returns the cases; all but the first of each model type are slow."""
    seen: set[str] = set()
    cases = []
    for case in CASES:
        marks = [pytest.mark.slow] if case.model_type in seen else []
        cases.append(pytest.param(case, marks=marks, id=case.name))
        seen.add(case.model_type)
    return cases


@pytest.mark.parametrize("case", _first_of_each_family())
def test_an_imported_model(case):
    norm = {} if case.start else {"rms_norm_eps": 1e-6}
    values = {"model_type": case.model_type} | norm | case.values
    task = FAMILIES[case.model_type].task_of(PublishedConfig(values, "config.json"))
    decays = check_decay(task.instantiate(path="task").variable_specs())
    assert any(decays.values()) and not all(decays.values())


def test_adapters():
    attention = TransformerStack.params().layer.self_attention.set(model_dim=8, num_heads=2)
    layer = attention.instantiate(path="attention")
    adapters = Adapters.params().set(rank=2).instantiate(path="attention.lora")
    adapters.add("w_query", layer.variables["w_query"])
    assert check_decay(adapters.variable_specs()) == {"w_query_a": True, "w_query_b": True}


class Own(Layer):
    """A layer as a user writes it."""

    def __init__(self, params, path=""):
        super().__init__(params, path)
        sizes, zero = {"M": 2, "N": 2, "D": 2, "E": 2}, initializers.constant(0.0)
        self.create_variable("w", "MN", sizes, zero)
        self.create_variable("bias", "M", sizes, zero)
        self.create_variable("b_experts", "EM", sizes, zero)
        self.create_variable("b_heads", "ND", sizes, zero, role=BIAS)
        self.create_variable("scale", "ND", sizes, zero, role=SCALE)


def test_a_layer_of_a_user():
    specs = Own(Own.params(), "own").variable_specs()
    assert [path for path, decays in check_decay(specs).items() if decays] == ["w"]
    assert {path: spec.role for path, spec in specs.flatten_items() if path != "w"} == {
        "bias": BIAS,
        "b_experts": BIAS,
        "b_heads": BIAS,
        "scale": SCALE,
    }


def test_an_unknown_role_is_refused():
    layer = Layer(Layer.params(), "own")
    sizes, zero = {"M": 2}, initializers.constant(0.0)
    with pytest.raises(ValueError, match=r"own\.b: role is 'bais'\. Did you mean 'bias'"):
        layer.create_variable("b", "M", sizes, zero, role="bais")
