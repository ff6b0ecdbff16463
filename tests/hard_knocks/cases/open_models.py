"""Published models that are not what their config says, and runs that are like none of them."""

from tests.hard_knocks.case import Case
from tests.hard_knocks.prepare import cut, folder, published_model, remove, trained, write

_IMPORT = "gshard-import --from=model --logdir=run"
_MODEL = published_model("model")
_EXPORT = "gshard-export --logdir=run --output=out --format=huggingface"

CASES = (
    Case(
        "an import from nowhere",
        "gshard-import --logdir=run",
        error="--from is missing: the directory of the published model",
    ),
    Case(
        "an import without a config",
        _IMPORT,
        given=(folder("model"),),
        error="model/config.json: there is no such file; every published model has one",
    ),
    Case(
        "an unknown architecture",
        _IMPORT,
        given=(published_model("model", model_type="llama4"),),
        error="model/config.json: the architecture 'llama4' is unknown. Did you mean 'llama'?",
    ),
    Case(
        "packed weights",
        _IMPORT,
        given=(published_model("model", quantization_config={"quant_method": "mxfp4"}),),
        error="model/config.json has a quantization_config: the tensors are packed. Load them with "
        "transformers, with dequantize=True in its quantization_config, and save_pretrained",
    ),
    Case(
        "a published model of pickles",
        _IMPORT,
        given=(_MODEL, remove("model/model.safetensors"), write("model/pytorch_model.bin", "x")),
        error="model/pytorch_model.bin is a pickle, which may run code when it is read. Convert it "
        "to safetensors: ...",
    ),
    Case(
        "a download that was cut off",
        _IMPORT,
        given=(_MODEL, cut("model/model.safetensors")),
        error="model/model.safetensors is damaged or cut off: ...",
    ),
    Case(
        "a published model without a tokenizer",
        _IMPORT,
        given=(_MODEL, remove("model/tokenizer.json")),
        error="model has no tokenizer: tokenizer.json or tokenizer.model was expected. ...",
    ),
    Case(
        "other sizes than the config's",
        _IMPORT,
        given=(published_model("model", intermediate_size=13),),
        error="model: the tensors do not fit config.json: "
        "model.layers.0.mlp.down_proj.weight is (8, 12); (8, 13) was expected; ...",
    ),
    Case(
        "a model of our own as a published one",
        _EXPORT,
        given=(trained("run", "language model"),),
        error="the run of language_model.from_files was not imported from a published model; ...",
    ),
)
