"""Exports that cannot be, and imports of published models that are not what their config says."""

from tests.hard_knocks.case import Case
from tests.hard_knocks.prepare import cut, folder, published_model, remove, trained, write

_EXPORT = "gshard-export --logdir=run --output=model "
_SAFETENSORS = _EXPORT + "--format=safetensors"
_RUN = trained("run")
_IMPORT = "gshard-import --from=model --logdir=run"
_MODEL = published_model("model")

CASES = (
    Case(
        "an export without a directory",
        "gshard-export --logdir=run --format=safetensors",
        given=(_RUN,),
        error="--output is missing: the directory to write",
    ),
    Case(
        "an export without a format",
        _EXPORT,
        given=(_RUN,),
        error="--format is missing: safetensors...",
    ),
    Case(
        "an unknown format",
        _EXPORT + "--format=safetensor",
        given=(_RUN,),
        error="--format=safetensor is unknown. Did you mean 'safetensors'?",
    ),
    Case(
        "a decoder of a task that decodes nothing",
        _EXPORT + "--format=saved_model",
        given=(_RUN,),
        error="test.tiny has the task TinyTask, which decodes nothing; --format=safetensors writes "
        "its weights",
    ),
    Case(
        "a beam for an export of weights",
        _SAFETENSORS + " --beam_size=4",
        given=(_RUN,),
        error="--format=safetensors writes weights, which do not depend on a decoder: --beam_size "
        "does not apply",
    ),
    Case(
        "sizes that are no numbers",
        _EXPORT + "--format=stablehlo --rows=1,eight",
        given=(_RUN,),
        error="--rows=1,eight: numbers were expected, such as --rows=1,8,32",
    ),
    Case(
        "sizes that are not ascending",
        _EXPORT + "--format=stablehlo --lengths=64,32",
        given=(_RUN,),
        error="--lengths=64,32: ascending sizes were expected, such as --lengths=1,8,32",
    ),
    Case(
        "a beam beyond the vocabulary for an export",
        _EXPORT + "--format=stablehlo --beam_size=1000",
        given=(trained("run", "translation"),),
        error="--beam_size=1000: 1 to 299 was expected, no more than the vocabulary has tokens "
        "besides the end",
    ),
    Case(
        "an export of longer texts than the model takes",
        _EXPORT + "--format=stablehlo --lengths=32,1000",
        given=(trained("run", "translation"),),
        error="--lengths=32,1000: the model takes texts of 256 tokens at most",
        slow=True,
    ),
    Case(
        "an export of no run",
        _SAFETENSORS,
        error="--logdir=run: there is no such directory. Train one first: gshard-train "
        "--experiment=NAME --logdir=run",
    ),
    Case(
        "an export of a run without a checkpoint",
        _SAFETENSORS,
        given=(_RUN, remove("run/checkpoints")),
        error="--logdir=run: the run of test.tiny has no checkpoint yet. ...",
    ),
    Case(
        "an export into a directory with files",
        _SAFETENSORS,
        given=(_RUN, folder("model"), write("model/mine", "kept")),
        error="--output=model exists and is not empty; give the name of a new directory",
    ),
    Case(
        "an export onto a file",
        _SAFETENSORS,
        given=(_RUN, write("model", "kept")),
        error="--output=model is a file; give the name of a new directory",
    ),
    Case(
        "an export into a directory that does not exist",
        "gshard-export --logdir=run --output=mdoels/new --format=safetensors",
        given=(_RUN,),
        error="--output=mdoels/new: there is no directory .../mdoels; create it first, or name "
        "another one",
    ),
    Case(
        "an export where no directory can be made",
        "gshard-export --logdir=run --output=/proc/model --format=safetensors",
        given=(_RUN,),
        error="--output=/proc/model cannot be written: ...",
    ),
    Case(
        "a disk that is full in the middle of an export",
        _SAFETENSORS,
        given=(_RUN,),
        limits={"RLIMIT_FSIZE": 512},
        error="--output=model cannot be written: file too large",
    ),
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
        given=(published_model("model", model_type="mamba"),),
        error="model/config.json: the architecture 'mamba' is unknown. The families are afmoe, "
        "arcee, cohere, cohere2, cwm, deepseek_v2, deepseek_v3, deepseek_v32, deepseek_v4, "
        "dots1, ernie4_5, ernie4_5_moe, exaone4, exaone_moe, flex_olmo, gemma, gemma2, "
        "gemma3_text, gemma4_text, glm, glm4, glm4_moe, glm4_moe_lite, glm_moe_dsa, gpt_oss, "
        "granite, granitemoe, granitemoehybrid, granitemoeshared, helium, hunyuan_v1_dense, "
        "hunyuan_v1_moe, hy_v3, hyperclovax, internlm3, iquestcoder, jais2, kimi_k2, "
        "kimi_linear, llama, llama4_text, m2m_100, marian, mbart, mellum, mimo, "
        "mimo_v2_flash, minimax_m2, ministral, ministral3, mistral, mistral4, mixtral, mt5, "
        "nemotron_h, nllb-moe, olmo2, olmo3, olmoe, phi3, phimoe, qwen2, qwen2_moe, qwen3, "
        "qwen3_5_moe_text, qwen3_5_text, qwen3_moe, qwen3_next, seed_oss, smollm3, "
        "solar_open, starcoder2, switch_transformers, t5, umt5, vaultgemma, youtu.",
    ),
    Case(
        "packed weights",
        _IMPORT,
        given=(published_model("model", quantization_config={"quant_method": "gptq"}),),
        error="model/config.json: the tensors are packed by quant_method='gptq' of the "
        "quantization_config; 'fp8', 'mxfp4', 'modelopt' (NVFP4) or 'compressed-tensors' "
        "(nvfp4-pack-quantized) was expected. Load them with transformers, with dequantize=True in "
        "the quantization_config, and save_pretrained",
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
        error="model: the tensors do not fit the model's config: "
        "model.layers.0.mlp.down_proj.weight is (8, 12); (8, 13) was expected; ...",
    ),
    Case(
        "a model of our own as a published one",
        _EXPORT + "--format=huggingface",
        given=(trained("run", "language model"),),
        error="the run of language_model.from_files was not imported, and no published family "
        "describes it: the nearest is ...",
    ),
    Case(
        "adapters of a model of our own",
        _EXPORT + "--format=peft",
        given=(trained("run", "language model"),),
        error="the run of language_model.from_files was not imported, ...",
    ),
    Case(
        "a task of our own as a published model",
        _EXPORT + "--format=huggingface",
        given=(trained("run"),),
        error="the run of test.tiny was not imported, and no published family describes it: its "
        "task is TinyTask, and ...",
    ),
)
