"""What is assumed where plans are compared with the GShard paper, and why they differ there."""

from __future__ import annotations

from collections.abc import Mapping

WEIGHTS = (
    "Ours are the arrays' sizes: of the 1.8 GB 0.4 are experts, 0.4 the other feed-forward layers,"
    " 0.6 attention and 0.4 embeddings. The two models differ on a core in their routers alone, by"
    " 0.01 GB, where the figure has 0.17 GB: it counts more than weights, or is read off that"
    " coarsely."
)
ACTIVATIONS = (
    "Ours are the temporaries without the gradients. A step here leaves the state alone if the norm"
    " of all gradients is not finite, so all are alive at once, as large as the weights; the"
    " paper's step needs no such norm and can use up one gradient after the other."
)
EQUAL_TOKENS = (
    "The figure does not say at how many tokens of a core it was taken. By its batch this model has"
    " four times the tokens a core of MoE(512E, 12L), yet their activations are nearly equal: both"
    " are taken to be of 2,048 tokens a core."
)
OWN_BATCH = (
    "The same figure beside what the batch of 1M tokens takes, 8,192 tokens a core: the figure can"
    " hardly be of these, see the row with 2,048."
)
TRAINED_TOKENS = (
    "Core-years of ours are for as many tokens as were trained on. Of the two models whose steps/s"
    " are known, these are steps/s times days times batch: 1.04 and 1.05 trillion. The others are"
    " taken to have seen as many."
)
STEPS: Mapping[str, str] = {
    "estimate": (
        "The estimate has each operation at its measured efficiency and nothing between operations:"
        " no start of a kernel, no uneven experts, no waiting for the slowest core or for input. A"
        " step of many short operations is the most optimistic. The program is as today's compiler"
        " fuses it, not that of 2020."
    ),
    "bound": (
        "Peak rates, and all communication beside the computation: no step of this program can be"
        " faster."
    ),
}
COST_GROWTH = (
    "Both with their batch of the table of models, on equally many tokens. A core of 128 has four"
    " times the tokens of one of 2,048, and reduces its gradients a quarter as often for them."
)
STEP_GROWTH = (
    "The paper says of this only that cost grows more slowly than the weights: fewer than 16 times"
    " is what is expected. What grows is the all-to-all, and the router's product with the experts."
)
ALL_TO_ALL = (
    "The bound is by how many links cut the torus in half: it grows as the square root of the"
    " cores, 4 times for 16 times as many. The estimate has its growth from the paper, so it is"
    " not compared."
)
COMPILE_TIME = (
    "Published is that it does not grow, without seconds. Seconds of one run each, which depend on"
    " what else the machine does."
)
COMPILE_DEPTH = (
    "The paper claims this of devices only; loops over the layers do the same for depth. Seconds of"
    " one run each, which depend on what else the machine does."
)
REMATERIALISATION = (
    "Here all of a layer but its input is computed again, once: of the arithmetic that is a quarter"
    " at most, since a backward pass is two forward passes. The paper's shares are larger, and grow"
    " with depth, so more than one forward pass was computed again; it does not say what."
)
ATTENTION = (
    "Ours are whole attention layers, with their projections, of which the paper has more than 85%:"
    " a plan's rows do not tell the two apart."
)
CORE_YEARS: Mapping[str, str] = {
    "dense_96l": (
        "No plan of the same thing: the paper's was a pipeline (GPipe), ours splits the batch and,"
        " by fsdp, the weights over all cores. Trained tokens are taken to be the mixtures'."
    ),
}
PEAK = (
    "Of the paper it is known that these were trained on so many cores of 16 GiB, by their batch of"
    " the table of models."
)
PEAKS: Mapping[str, str] = {
    "moe_2048e_60l": (
        "The paper trained it, if not for long. Of ours 7.7 GB are weights, and as many the gradients,"
        " which wait for the norm of all of them (see activations): used up one after the other, as"
        " in the paper, they would leave it room."
    ),
}
