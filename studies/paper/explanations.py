"""Assumptions of the comparisons with the GShard paper, and reasons for the differences."""

from __future__ import annotations

from collections.abc import Mapping

WEIGHTS = (
    "Our figure is the size of the arrays: 1.8 GB, of which 0.4 are experts, 0.4 the other "
    "feed-forward layers, 0.6 attention and 0.4 embeddings. On a core the two models differ only "
    "in their routers, by 0.01 GB. The paper's figure differs by 0.17 GB: either it counts more "
    "than weights, or it cannot be read more precisely."
)
ACTIVATIONS = (
    "Our figure is the temporaries without the gradients. Our step skips an update if the norm of "
    "all gradients is not finite, so all gradients are alive at once and as large as the weights. "
    "The paper's Adafactor clips the update of each weight separately and can free each gradient "
    "early."
)
WEIGHTS_OF_600_BILLION = (
    "Our figure is the size of the arrays: 1.2 GB are experts, 1.2 the other feed-forward layers, "
    "1.8 attention, 0.4 embeddings and 0.15 routers. The factored moments add 0.17 GB. The paper's "
    "figure has 0.06, 0.22 and 1.24 GB more than our arrays for 128, 512 and 2,048 experts. It "
    "grows with experts and layers as arrays of a router's size would; the paper does not say "
    "what it counts."
)
ACTIVATIONS_OF_600_BILLION = (
    "Our figure is the temporaries without the gradients, 6.26 GB with them. The paper does not "
    "say where gradients count. Its compiler chose what to recompute, and its activations are 2.7 "
    "times those of MoE(512E, 12L) for three times the layers, as tensors saved in each layer are. "
    "Our step recomputes whole layers: it saves their inputs alone."
)
EQUAL_TOKENS = (
    "The figure does not give the tokens per core. By its batch size, this model has four times "
    "the tokens per core of MoE(512E, 12L), yet their activations are nearly equal. We assume "
    "2,048 tokens per core for both."
)
OWN_BATCH = (
    "The same published figure, compared with the model's own batch of 1M tokens, 8,192 per core. "
    "The figure is unlikely to be for this batch; see the row with 2,048 tokens per core."
)
TRAINED_TOKENS = (
    "Our core-years are for the number of tokens that the model was trained on: steps/s times "
    "days times batch size, 1.04 and 1.05 trillion for the two models with published steps/s. For "
    "the others we assume the mean of the two."
)
STEPS: Mapping[str, str] = {
    "estimate": (
        "The estimate runs each operation at its measured efficiency, without gaps between "
        "operations: no kernel launches, no uneven expert loads, no waiting for the slowest core "
        "or for input. The program is compiled by today's compiler, not that of 2020. We do not "
        "know which of these slowed the paper's runs."
    ),
    "bound": (
        "Peak rates, with communication fully overlapped by computation: no step of this program "
        "can be faster."
    ),
}
COST_GROWTH = (
    "Both models with the batch size of the paper's table, on equally many tokens. The difference "
    "is that of the core-years of 128E; see there. The row with 2,048 tokens per core compares "
    "the steps themselves."
)
STEP_GROWTH = (
    "The paper says only that cost grows more slowly than the number of weights, so less than 16 "
    "times is expected. The growing parts are the router's matrix product and the all-to-all; the "
    "estimate of the all-to-all grows 3.75 times, as measured in the paper."
)
ALL_TO_ALL = (
    "The bound depends on the bisection bandwidth. In a torus, the time grows as the square root "
    "of the number of cores: 4 times for 16 times the cores. A whole pod has wrap-around links "
    "and a slice of 128 cores does not (topologies.py), so our growth is 2 times. The measured "
    "all-to-all did not benefit from these links."
)
COMPILE_TIME = (
    "The paper says that compile time does not grow, without giving seconds. Each figure is one "
    "compilation and depends on the load of the machine."
)
COMPILE_DEPTH = (
    "The paper claims this only for devices; loops over layers do the same for depth. Each figure "
    "is one compilation and depends on the load of the machine."
)
REMATERIALIZATION = (
    "Our models recompute everything in a layer except its input, once. That is at most a quarter "
    "of the arithmetic, since a backward pass costs two forward passes. The paper's shares are "
    "larger and grow with depth, so it recomputed more than one forward pass; it does not say "
    "what."
)
ATTENTION = (
    "Our figure is for whole attention layers, including their projections, which run above 85% "
    "of peak in the paper. A plan's rows do not separate the two."
)
CORE_YEARS: Mapping[str, str] = {
    "moe_128e_36l": (
        "The table's figures for 128E are inconsistent with our definition of a token: one target "
        "position and one source position. The table gives 1,074 billion tokens until this model "
        "reached a cross-entropy of 0.6. In 17.3 days that is 5,600 tokens/s per core, for which "
        "our program's matrix products (12.2 GFLOP per token) would need 111% of peak; the other "
        "models need 23% to 43%. If the table counts source and target positions together, our "
        "core-years would halve and match here, but not for the other models."
    ),
    "moe_128e_12l": (
        "As for MoE(128E, 36L): 995 billion tokens to a cross-entropy of 0.7 in 5.4 days are "
        "16,700 tokens/s per core, for which our program's matrix products (3.2 GFLOP per token) "
        "would need 88% of peak and the rest of the step no time."
    ),
    "dense_96l": (
        "The programs differ: the paper's was a pipeline (GPipe), ours shards the batch and the "
        "weights (fsdp) over all cores. We assume as many training tokens as for the mixtures."
    ),
}
PEAK = (
    "The paper trained these models on this many cores with 16 GiB each, with the batch size of "
    "its table of models, so they must fit."
)
PEAKS: Mapping[str, str] = {
    "moe_128e_36l": (
        "With 8,192 tokens per core, from the batch of 1M tokens. The paper's may have been "
        "fewer; see the core-years of this model."
    ),
    "moe_2048e_60l": ("The paper trained this model until training became unstable."),
}
