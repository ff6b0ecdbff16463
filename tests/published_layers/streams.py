"""Params of a small stack with residual streams, for tests."""

from lingvo_gshard.core.config.params import Params
from lingvo_gshard.layers.moe import MixtureOfExperts
from lingvo_gshard.wings.dropless.dispatch import DroplessDispatch
from lingvo_gshard.wings.published_layers.hyper_connections import HyperStack
from lingvo_gshard.wings.published_layers.routers import LookupRouter, SoftplusRouter
from tests.layers.attention import attention_options


def small_stack(**values: object) -> Params:
    """Returns the Params of four layers as DeepSeek-V4 has them, the first with other parts."""
    near, heavy = {"compressed": 0, "index_heads": 0}, {"overlaps": False, "index_heads": 0}
    kinds = [attention_options.compressed(**values) for values in ({}, heavy)]
    moe = MixtureOfExperts.params().set(num_experts=4, hidden_dim=8, shared_hidden_dim=8)
    moe.set(router=SoftplusRouter.params(), dispatch=DroplessDispatch.params())
    stack = HyperStack.params().set(num_layers=4, hidden_dim=8, num_heads=2, moe_every=1, moe=moe)
    stack.set(attention_pattern=tuple(kinds), sequential_first=2, is_causal=True)
    stack.layer.mixer.set(streams=2, iterations=3)
    stack.set(
        first_attentions=(attention_options.compressed(**near),),
        first_routed=1,
        first_router=LookupRouter.params().set(vocabulary_size=32),
    )
    return stack.set(**values)
