"""The quickstart's experiment, so small that it compiles in seconds."""

EXPERIMENT = "translation.quickstart"
SETTINGS = (
    "task.model_dim = 16",
    "task.encoder.num_layers = 1",
    "task.encoder.hidden_dim = 32",
    "task.encoder.moe_every = 1",
    "task.encoder.moe.group_size = 16",
    "task.decoder.num_layers = 1",
    "task.decoder.hidden_dim = 32",
    "task.decoder.moe_every = 0",
    "input.batch_rows = 16",
    "input.source_length = 16",
    "input.target_length = 16",
    "input.vocabulary.size = 64",
)
FLAGS = (f"--experiment={EXPERIMENT}", *(f"--gin_param={setting}" for setting in SETTINGS))
