"""Trains with transformers or JoeyNMT, in a process without lingvo_gshard and TensorFlow.

    python peer_process.py setup.json

`peers.py` starts this program with any Python that has the libraries. setup.json has the setting of
`settings.py`, the seconds to train, the folder of the text and its vocabulary, and a folder for all
files that a library writes. The program trains, translates the test sources, and answers with one
line of JSON, which `Clock.answer` describes.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time

from benchmarks import marian as marian_models

# Ids of the vocabulary, as JoeyNMT expects them.
PAD, BOS, EOS = 1, 2, 3
LABEL_SMOOTHING, MOST_TOKENS = 0.1, 100


class Clock:
    """Counts what is trained, from the first step on, until the time is over.

    Attributes:
      steps: steps so far.
      tokens: source and target tokens so far, without padding, with the ends of texts.
    """

    def __init__(self, limit):
        self._limit, self._began, self._ended = limit, None, None
        self.steps, self.tokens = 0, 0

    @property
    def share(self):
        """The share of the time that is over."""
        return 0.0 if self._began is None else (time.monotonic() - self._began) / self._limit

    def begin_step(self, source_tokens, target_tokens):
        """Counts a step that begins."""
        self._began = self._began or time.monotonic()
        self.steps += 1
        self.tokens += int(source_tokens) + int(target_tokens)

    def end_step(self):
        """Returns whether the time is over."""
        self._ended = time.monotonic()
        return self.share >= 1

    def answer(self, model, translations):
        """Returns the answer: the trained model's weights and the test rows' translations."""
        return {
            # A tied table counts once.
            "parameters": sum(w.numel() for w in model.parameters() if w.requires_grad),
            "steps": self.steps,
            "seconds": self._ended - self._began,
            "tokens": self.tokens,
            "translations": translations,
        }


def lines(path):
    """Returns the lines of a text."""
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def marian(setup, text, clock):
    """Trains a MarianMTModel with Seq2SeqTrainer, and returns the answer."""
    import transformers

    transformers.set_seed(setup["seed"])
    ids = pathlib.Path(setup["folder"], "ids.json")
    pieces = enumerate(lines(text / "vocabulary.vocab"))
    ids.write_text(json.dumps({piece: index for index, piece in pieces}), encoding="utf-8")
    source = target = str(text / "vocabulary.model")
    tokenizer = transformers.MarianTokenizer(source, target, str(ids))
    model = transformers.MarianMTModel(marian_config(setup))
    train_marian(setup, text, clock, model, tokenizer)
    sources = lines(text / "test.src")
    return clock.answer(model, translate_marian(model.eval(), tokenizer, sources))


def marian_config(setup):
    """Returns the config of a model with tied and scaled embeddings, as published models have."""
    sizes = setup["sizes"]
    return marian_models.config_of(
        sizes,
        dropout=setup["dropout"],
        scale_embedding=True,
        # As wide as Marian's own, by Glorot; the usual 0.02 is for pretraining, and learns slower.
        init_std=sizes["model_dim"] ** -0.5,
        pad_token_id=PAD,
        eos_token_id=EOS,
        decoder_start_token_id=PAD,
        forced_eos_token_id=EOS,
    )


def train_marian(setup, text, clock, model, tokenizer):
    """Trains the model until the time is over."""
    import torch
    import transformers

    class Trainer(transformers.Seq2SeqTrainer):
        def training_step(self, model, inputs, *rest):
            clock.begin_step(inputs["attention_mask"].sum(), (inputs["labels"] >= 0).sum())
            return super().training_step(model, inputs, *rest)

        def create_scheduler(self, num_training_steps, optimizer=None):
            if setup["schedule"] != "linear":
                return super().create_scheduler(num_training_steps, optimizer)
            # As many steps as the time allows, which the library's schedule must know before.
            rise = max(setup["warmup_steps"], 1)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer,
                lambda step: max(min((step + 1) / rise, 1 - clock.share), 0.0),
            )
            return self.lr_scheduler

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = clock.end_step()

    arguments = transformers.Seq2SeqTrainingArguments(
        output_dir=setup["folder"],
        per_device_train_batch_size=setup["batch_size"],
        train_sampling_strategy="group_by_length",
        learning_rate=setup["learning_rate"],
        warmup_steps=setup["warmup_steps"],
        lr_scheduler_type=setup["schedule"],
        adam_beta2=0.98,
        adam_epsilon=1e-9,
        label_smoothing_factor=LABEL_SMOOTHING,
        max_steps=10**7,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=setup["seed"],
    )
    sources, targets = (lines(text / f"train.{side}") for side in ("src", "trg"))
    encoded = tokenizer(sources, text_target=targets, truncation=True)
    pairs = zip(encoded["input_ids"], encoded["labels"], strict=True)
    Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": source, "labels": target} for source, target in pairs],
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        callbacks=[Stop()],
    ).train()


def translate_marian(model, tokenizer, sources):
    """Returns translations with the beam of OPUS-MT's models, in batches of like lengths."""
    import torch

    order = sorted(range(len(sources)), key=lambda index: len(sources[index]))
    found = [""] * len(sources)
    for first in range(0, len(order), 64):
        rows = order[first : first + 64]
        batch = tokenizer(
            [sources[row] for row in rows], return_tensors="pt", padding=True, truncation=True
        )
        with torch.inference_mode():
            ids = model.generate(
                **batch,
                num_beams=4,
                do_sample=False,
                max_new_tokens=min(2 * batch["input_ids"].shape[1] + 10, MOST_TOKENS),
            )
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
        for row, text in zip(rows, texts, strict=True):
            found[row] = text
    return found


def joeynmt(setup, text, clock):
    """Trains with JoeyNMT, and returns the answer."""
    from joeynmt import helpers, prediction, training

    models = []

    class TrainManager(training.TrainManager):
        def _train_step(self, batch):
            if clock.steps and clock.end_step():
                # Keeps the weights and ends the training.
                raise KeyboardInterrupt
            clock.begin_step(batch.src_length.sum(), batch.ntokens)
            models[:] = [self.model]
            return super()._train_step(batch)

    training.TrainManager = TrainManager
    allow_empty_translations()
    config, folder = joeynmt_config(setup, text), pathlib.Path(setup["folder"], "joeynmt")
    helpers.make_model_dir(folder)
    training.train(rank=0, world_size=None, cfg=config, skip_test=True)
    del config["data"]["dev"]
    prediction.test(config, output_path=f"{folder}/translations")
    return clock.answer(models[0], lines(folder / "translations.test"))


def allow_empty_translations():
    """Lets JoeyNMT translate a text to nothing, which ends the process otherwise."""
    from joeynmt.tokenizers import SentencePieceTokenizer

    usual = SentencePieceTokenizer.post_process

    def post_process(*arguments, **options):
        try:
            return usual(*arguments, **options)
        except AssertionError:
            return ""

    SentencePieceTokenizer.post_process = post_process


def joeynmt_config(setup, text):
    """Returns the config. What it leaves out is as by default, and as in the published one."""
    side = {
        "max_length": 512,
        "level": "bpe",
        "voc_file": str(text / "vocabulary.vocab"),
        "tokenizer_type": "sentencepiece",
        "tokenizer_cfg": {"model_file": str(text / "vocabulary.model"), "pretokenizer": "none"},
    }
    data = {split: str(text / split) for split in ("train", "dev", "test")}
    data |= {"src": {"lang": "src", **side}, "trg": {"lang": "trg", **side}}
    testing = {"beam_size": 5, "beam_alpha": 1.0, "batch_size": 1024, "batch_type": "token"}
    training = {
        "optimizer": "adamw",
        "normalization": "tokens",
        "scheduling": "warmupinversesquareroot",
        "learning_rate": setup["learning_rate"],
        "learning_rate_warmup": setup["warmup_steps"],
        "learning_rate_min": 1e-8,
        "label_smoothing": LABEL_SMOOTHING,
        "batch_size": setup["batch_size"],
        "batch_type": "token",
        "epochs": 10**6,
        "validation_freq": 10**9,
    }
    sizes = setup["sizes"]
    stacks = {
        side: {
            "type": "transformer",
            "num_layers": sizes[f"{side}_layers"],
            "num_heads": sizes["num_heads"],
            "embeddings": {"embedding_dim": sizes["model_dim"], "scale": True},
            "hidden_size": sizes["model_dim"],
            "ff_size": sizes[f"{side}_hidden"],
            "dropout": setup["dropout"],
            "layer_norm": "pre",
        }
        for side in ("encoder", "decoder")
    }
    return {
        "name": "peer",
        "model_dir": str(pathlib.Path(setup["folder"], "joeynmt")),
        "use_cuda": False,
        "random_seed": setup["seed"],
        "data": data,
        "testing": {**testing, "max_output_length": MOST_TOKENS, "eval_metrics": ["bleu"]},
        "training": training,
        "model": {"tied_embeddings": True, "tied_softmax": True, **stacks},
    }


def main():
    """Trains and translates as the setup says."""
    # Lines that libraries print must not mix with the answer.
    answers, sys.stdout = sys.stdout, sys.stderr
    setup = json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8"))
    text, clock = pathlib.Path(setup["text"]), Clock(setup["seconds"])
    import torch

    torch.set_num_threads(setup["threads"])
    answer = {"marian": marian, "joeynmt": joeynmt}[setup["library"]](setup, text, clock)
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
