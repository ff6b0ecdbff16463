"""What is assumed where plans are compared with the GShard paper, and why they differ there."""

from __future__ import annotations

from collections.abc import Mapping

WEIGHTS = (
    "Ours are the arrays' sizes: of the 1.8 GB 0.4 are experts, 0.4 the other feed-forward"
    " layers, 0.6 attention and 0.4 embeddings. The two models differ on a core in their routers"
    " alone, by 0.01 GB, where the figure has 0.17 GB: it counts more than weights, or is read off"
    " that coarsely."
)
ACTIVATIONS = (
    "Ours are the temporaries without the gradients. A step here leaves the state alone if the"
    " norm of all gradients is not finite, so all are alive at once, as large as the weights; the"
    " paper's Adafactor clips the update of each weight by itself, and can use up one gradient"
    " after the other."
)
EQUAL_TOKENS = (
    "The figure does not say at how many tokens of a core it was taken. By its batch this model"
    " has four times the tokens a core of MoE(512E, 12L), yet their activations are nearly equal:"
    " both are taken to be of 2,048 tokens a core."
)
OWN_BATCH = (
    "The same figure beside what the batch of 1M tokens takes, 8,192 tokens a core: the figure"
    " can hardly be of these, see the row with 2,048."
)
TRAINED_TOKENS = (
    "Core-years of ours are for as many tokens as were trained on. Of the two models whose"
    " steps/s are known, these are steps/s times days times batch: 1.04 and 1.05 trillion. The"
    " others are taken to have seen as many."
)
STEPS: Mapping[str, str] = {
    "estimate": (
        "The estimate has each operation at its measured efficiency and nothing between"
        " operations: no start of a kernel, no uneven experts, no waiting for the slowest core or"
        " for input. The program is as today's compiler fuses it, not that of 2020. Which of these"
        " the published speed lacks is not known."
    ),
    "bound": (
        "Peak rates, and all communication beside the computation: no step of this program can be"
        " faster."
    ),
}
COST_GROWTH = (
    "Both with their batch of the table of models, on equally many tokens. It is off as the"
    " core-years of 128E are, see there; with 2,048 tokens a core on both the steps themselves are"
    " compared."
)
STEP_GROWTH = (
    "The paper says of this only that cost grows more slowly than the weights: fewer than 16"
    " times is what is expected. What grows is the router's product with the experts and the"
    " all-to-all, the latter in the estimate as measured in the paper, 3.75 times."
)
ALL_TO_ALL = (
    "The bound is by how many links cut the chips in half. In a torus it grows as the square root"
    " of the cores, 4 times for 16 times as many. But a whole pod is joined around its edges, a"
    " slice of 128 cores is not (topologies.py), which makes it 2; the all-to-all that the paper"
    " measured has not gained from those cables."
)
COMPILE_TIME = (
    "Published is that it does not grow, without seconds. Seconds of one run each, which depend"
    " on what else the machine does."
)
COMPILE_DEPTH = (
    "The paper claims this of devices only; loops over the layers do the same for depth. Seconds"
    " of one run each, which depend on what else the machine does."
)
REMATERIALIZATION = (
    "Here all of a layer but its input is computed again, once: of the arithmetic that is a"
    " quarter at most, since a backward pass is two forward passes. The paper's shares are larger,"
    " and grow with depth, so more than one forward pass was computed again; it does not say what."
)
ATTENTION = (
    "Ours are whole attention layers, with their projections, of which the paper has more than"
    " 85%: a plan's rows do not tell the two apart."
)
CORE_YEARS: Mapping[str, str] = {
    "moe_128e_36l": (
        "The table's figures of 128E do not go together with a token that is one position of the"
        " target and one of the source, as here. It counts 1,074 billion tokens until this model"
        " came to a cross-entropy of 0.6; in 17.3 days these are 5,600 a second of a core, for"
        " which our program's matrix products (12.2 GFLOP a token) would take 111% of the peak. Of"
        " the other models they take 23 to 43%. Tokens counted on both sides together, half of"
        " ours, would give the published core-years here, and put the others off."
    ),
    "moe_128e_12l": (
        "As MoE(128E, 36L): 995 billion tokens to a cross-entropy of 0.7 are 16,700 a second of a"
        " core in 5.4 days, for which our program's matrix products (3.2 GFLOP a token) would take"
        " 88% of the peak, and the rest of the step no time at all."
    ),
    "dense_96l": (
        "No plan of the same thing: the paper's was a pipeline (GPipe), ours splits the batch"
        " and, by fsdp, the weights over all cores. Trained tokens are taken to be the mixtures'."
    ),
}
PEAK = (
    "Of the paper it is known that these were trained on so many cores of 16 GiB, by their batch"
    " of the table of models."
)
PEAKS: Mapping[str, str] = {
    "moe_128e_36l": (
        "Of 8,192 tokens a core, by the batch of 1M; see its core-years for why the paper's may"
        " have been fewer."
    ),
    "moe_2048e_60l": ("The paper trained it, until it became unstable."),
}
