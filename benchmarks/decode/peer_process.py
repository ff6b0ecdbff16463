"""Decodes with PyTorch or CTranslate2, in a process without lingvo_gshard and TensorFlow.

    python peer_process.py setup.json

`peers.py` starts this program with any Python that has torch, transformers and ctranslate2.
setup.json, which `peers.py` writes, has the number of threads, the sizes of the models and the
cases. For each line "ENGINE<tab>CASE" of standard input, the program decodes a case and answers
with the seconds and the number of tokens. Each engine uses the number of threads that is fastest
for the case. The weights are random, and all engines of a model have the same weights.
"""

from __future__ import annotations

import json
import os
import sys
import time

from benchmarks import marian

HUGGING_FACE, CTRANSLATE2_INT8 = "Hugging Face", "CTranslate2 int8"
CTRANSLATE2 = {"CTranslate2 float32": "float32", CTRANSLATE2_INT8: "int8"}


def make_translation_model(sizes):
    """Returns a MarianMTModel with random weights. The last of its ids is padding."""
    import transformers

    config = marian.config_of(
        sizes,
        vocab_size=sizes["vocabulary_size"] + 1,
        eos_token_id=sizes["eos_id"],
        pad_token_id=sizes["vocabulary_size"],
        decoder_start_token_id=sizes["vocabulary_size"],
        forced_eos_token_id=None,
    )
    return transformers.MarianMTModel(config).eval()


def make_language_model(sizes):
    """Returns a GPT2LMHeadModel with random weights."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=sizes["vocabulary_size"],
        n_embd=sizes["model_dim"],
        n_layer=sizes["decoder_layers"],
        n_head=sizes["num_heads"],
        n_inner=sizes["decoder_hidden"],
        n_positions=sizes["positions"],
        bos_token_id=sizes["eos_id"],
        eos_token_id=sizes["eos_id"],
        pad_token_id=sizes["eos_id"],
    )
    return transformers.GPT2LMHeadModel(config).eval()


def names_of_ids(sizes):
    """Returns the vocabulary of CTranslate2, which takes texts as lists of names."""
    names = [f"t{index}" for index in range(sizes["vocabulary_size"])]
    names[0] = "<unk>"
    names[sizes["eos_id"]] = "</s>"
    return names


def convert(model, sizes, quantization, directory):
    """Writes a model of transformers for CTranslate2."""
    from ctranslate2.converters import transformers as converters

    is_translation = sizes["encoder_layers"] > 0
    loader = converters.MarianMTLoader() if is_translation else converters.GPT2Loader()
    spec = loader.get_model_spec(model)
    loader.set_vocabulary(spec, names_of_ids(sizes))
    spec.config.eos_token = "</s>"
    spec.config.unk_token = "<unk>"
    if is_translation:
        spec.config.decoder_start_token = "</s>"
    else:
        spec.config.bos_token = "</s>"
    spec.validate()
    spec.optimize(quantization=quantization)
    os.makedirs(directory)
    spec.save(directory)


class HuggingFace:
    """Models of transformers, run by PyTorch.

    Attributes:
      thread_counts: the numbers of threads that a case may be decoded with.
    """

    def __init__(self, models, threads):
        self.models, self.thread_counts = models, sorted({1, threads})

    def decode(self, case, threads):
        """Decodes all texts of a case and returns their number of tokens."""
        import torch

        torch.set_num_threads(threads)
        return sum(self._decode_batch(case, batch) for batch in case["batches"])

    def _decode_batch(self, case, batch):
        import torch

        model, is_translation = self.models[case["model"]], case["model"] == "translation"
        eos, pad = model.config.eos_token_id, model.config.pad_token_id
        texts = [[*text, eos] if is_translation else [eos, *text] for text in batch["texts"]]
        longest = max(map(len, texts))
        ids = torch.tensor([text + [pad] * (longest - len(text)) for text in texts])
        lengths = torch.tensor([len(text) for text in texts])
        mask = (torch.arange(longest)[None] < lengths[:, None]).long()
        with torch.inference_mode():
            found = model.generate(
                input_ids=ids,
                attention_mask=mask,
                num_beams=case["beam"],
                do_sample=False,
                min_new_tokens=batch["tokens"],
                max_new_tokens=batch["tokens"],
            )
        before = 1 if is_translation else longest
        return (found.shape[1] - before) * found.shape[0]


class CTranslate2:
    """Models in the format of CTranslate2.

    Attributes:
      thread_counts: the numbers of threads that a batch may be decoded with.
    """

    def __init__(self, directories, setup):
        import ctranslate2

        self.names = {name: names_of_ids(sizes) for name, sizes in setup["models"].items()}
        self.thread_counts = sorted({1, setup["threads"]})
        makers = {"translation": ctranslate2.Translator, "language_model": ctranslate2.Generator}
        # Batches are decoded side by side where there are threads for it.
        self.engines = {
            (name, threads): makers[name](
                directory, inter_threads=setup["threads"] // threads, intra_threads=threads
            )
            for name, directory in directories.items()
            for threads in self.thread_counts
        }

    def decode(self, case, threads):
        """Decodes all texts of a case and returns their number of tokens."""
        name, results = case["model"], []
        engine = self.engines[name, threads]
        for batch in case["batches"]:
            texts = [[self.names[name][index] for index in text] for text in batch["texts"]]
            start = self._translate if name == "translation" else self._generate
            results += start(engine, texts, batch["tokens"], case["beam"])
        return sum(map(count_tokens, results))

    def _translate(self, engine, texts, tokens, beam):
        return engine.translate_batch(
            [[*text, "</s>"] for text in texts],
            beam_size=beam,
            min_decoding_length=tokens,
            max_decoding_length=tokens,
            asynchronous=True,
        )

    def _generate(self, engine, texts, tokens, beam):
        return engine.generate_batch(
            [["</s>", *text] for text in texts],
            beam_size=beam,
            min_length=tokens,
            max_length=tokens,
            include_prompt_in_result=False,
            asynchronous=True,
        )


def count_tokens(pending):
    """Waits for a result of CTranslate2 and returns its number of tokens."""
    found = pending.result()
    texts = found.hypotheses if hasattr(found, "hypotheses") else found.sequences
    return len(texts[0])


def make_engines(setup):
    """Returns engine name -> engine. Engines of one model have the same weights."""
    import torch

    torch.manual_seed(0)
    makers = {"translation": make_translation_model, "language_model": make_language_model}
    models = {name: makers[name](sizes) for name, sizes in setup["models"].items()}
    engines = {HUGGING_FACE: HuggingFace(models, setup["threads"])}
    for engine, quantization in CTRANSLATE2.items():
        directories = {
            name: os.path.join(setup["directory"], f"{name}-{quantization}") for name in models
        }
        for name, directory in directories.items():
            convert(models[name], setup["models"][name], quantization, directory)
        engines[engine] = CTranslate2(directories, setup)
    return engines


def seconds_of(engine, case, threads):
    """Decodes a case and returns the seconds and the number of tokens."""
    started = time.perf_counter()
    tokens = engine.decode(case, threads)
    return time.perf_counter() - started, tokens


def best_threads(engine, case):
    """Returns the number of threads that decode a case fastest. Small products need one."""
    for threads in engine.thread_counts:
        engine.decode(case, threads)
    return min(engine.thread_counts, key=lambda threads: seconds_of(engine, case, threads))


def main():
    """Reads the setup, then answers requests until standard input ends."""
    # Lines that libraries print must not mix with the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    with open(sys.argv[1], encoding="utf-8") as file:
        setup = json.load(file)
    engines, best = make_engines(setup), {}
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        name, index = line.rstrip("\n").split("\t")
        engine, case = engines[name], setup["cases"][int(index)]
        if (name, index) not in best:
            best[name, index] = best_threads(engine, case)
        seconds, tokens = seconds_of(engine, case, best[name, index])
        print(f"{seconds}\t{tokens}", file=answers, flush=True)


if __name__ == "__main__":
    main()
