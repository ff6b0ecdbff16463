# tests: wings/preparation/vocabularies/byte_ranks.py
# tests: wings/preparation/vocabularies/published_vocabulary.py
"""Tests tekken.json and files of tiktoken, against loops that merge bytes by their ranks.

The slow test compares with tiktoken itself.
"""

import base64
import collections
import functools
import json
import os
import subprocess

import pytest
import regex

from benchmarks.peer_python import find_python
from lingvo_gshard.wings.preparation.vocabularies import byte_ranks, others
from lingvo_gshard.wings.preparation.vocabularies.published_vocabulary import PublishedVocabulary
from tests.data.vocabularies import tricky_texts

LINES = (
    "the file could not be opened, and the window's title is missing",
    "die Datei konnte nicht geöffnet werden; das Fenster wird GESCHLOSSEN",
    "Не удалось открыть файл. 文件无法打开。ファイルを開けません",
    "int main(void) { return 1234567; }\n\n\tif (x) {}\n",
    "لا يمكن فتح الملف ไม่สามารถเปิดไฟล์ได้",
)
TRICKY = (
    *LINES,
    "",
    " ",
    "  two  spaces at both ends  ",
    "\n",
    "line\r\nends\n\n\nand  \n blanks\t\t",
    "emoji 😀👩\u200d👩\u200d👧 flags 🇩🇪",
    "combining e\u0301 a\u0308\u0323 and nukta क़",
    "NUL\0inside and \ufeffmark",
    "I'll we'RE don't DON'T ''s",
    "12 123 1234 12345 ١٢٣٤ ⅷ",
    "x" * 400,
    "the" * 100 + " " * 80,
    "ÀÉÎ ǅ ÿ Straße İi",
)
# The same as in tiktoken, where $ is the end of the text alone.
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"
    r"\s++\Z|\s*[\r\n]|\s+(?!\S)|\s"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PEER = """
import base64, json, sys, tiktoken
from tiktoken_ext import openai_public
setup = json.load(open(sys.argv[1]))
ranks = {base64.b64decode(token): rank for token, rank in setup["ranks"].items()}
openai_public.load_tiktoken_bpe = lambda *args, **kwargs: ranks
found = {}
for name in setup["names"]:
    made = getattr(openai_public, name)()
    encoding = tiktoken.Encoding(name, pat_str=made["pat_str"], mergeable_ranks=ranks,
                                 special_tokens={})
    found[name] = [encoding.encode(text, disallowed_special=()) for text in setup["texts"]]
for name, pattern in setup["patterns"].items():
    # mistral-common encodes in this way, too.
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    found[name] = [encoding.encode(text, disallowed_special=()) for text in setup["texts"]]
print(json.dumps(found))
"""


@functools.cache
def trained(merges=300):
    """Returns ranks: all bytes, then the most frequent pairs of a few lines."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    words = [
        [bytes([b]) for b in part.encode()] for x in LINES for part in regex.findall(TEKKEN, x)
    ]
    for _ in range(merges):
        pairs = collections.Counter(pair for w in words for pair in zip(w, w[1:], strict=False))
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        ranks.setdefault(b"".join(best), len(ranks))
        words = [merged(word, *best) for word in words]
    return ranks


def merged(word, left, right):
    """Returns a word with each pair of these neighbors made one."""
    found = []
    for piece in word:
        if found and found[-1] == left and piece == right:
            found[-1] = left + right
        else:
            found.append(piece)
    return found


def encode_by_loops(ranks, pattern, text):
    """Returns ids: in each part, the pair with the lowest rank is merged until none has one."""
    ids = []
    for part in regex.findall(pattern, text):
        pieces = [bytes([byte]) for byte in part.encode()]
        while True:
            pairs = [
                (ranks.get(a + b), i)
                for i, (a, b) in enumerate(zip(pieces, pieces[1:], strict=False))
            ]
            known = [pair for pair in pairs if pair[0] is not None]
            if not known:
                break
            _, at = min(known)
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        ids += [ranks[piece] for piece in pieces]
    return ids


def write_tiktoken(path, ranks):
    lines = (f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())
    path.write_text("".join(lines))
    return str(path)


def tekken(ranks, special=10, **values):
    """Returns the content of a tekken.json, with a token more than the model has."""
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in {**ranks, b"zzzz": len(ranks)}.items()
    ]
    config = {"pattern": TEKKEN, "default_num_special_tokens": special}
    config |= {"default_vocab_size": special + len(ranks), "version": "v7"}
    names = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
    listed = [{"rank": r, "token_str": name, "is_control": True} for r, name in enumerate(names)]
    return {"config": config, "vocab": vocab, "special_tokens": listed, **values}


def test_a_file_of_tiktoken_gives_the_ids_of_merging_by_rank(tmp_path, monkeypatch):
    ranks = trained()
    special = {"<|endoftext|>": len(ranks)}
    monkeypatch.setitem(byte_ranks.KNOWN.ids, "cl100k_base", special)
    path = write_tiktoken(tmp_path / "cl100k_base.tiktoken", ranks)
    (vocabulary,) = others.of_others(path)
    assert (vocabulary.size, vocabulary.eos_id) == (len(ranks) + 1, len(ranks))
    for text in TRICKY:
        ids = vocabulary.encode(text)
        assert ids == encode_by_loops(ranks, CL100K, text), text
        assert vocabulary.decode(ids) == text


@pytest.mark.parametrize("pattern", [CL100K, TEKKEN], ids=["cl100k", "tekken"])
def test_drawn_texts_have_the_ids_of_merging_by_rank(tmp_path, pattern):
    ranks = trained()
    own = byte_ranks.KNOWN.patterns["cl100k_base"] if pattern is CL100K else pattern
    path = tmp_path / "tokenizer.json"
    path.write_text(byte_ranks.tokenizer_json(ranks, own, {"</s>": len(ranks)}))
    (vocabulary,) = others.of_others(str(path))
    for text in tricky_texts.texts(40):
        # A long part takes loops a long time.
        if len(text) < 400:
            assert vocabulary.encode(text) == encode_by_loops(ranks, pattern, text), repr(text)
        assert vocabulary.decode(vocabulary.encode(text)) == text


def test_tekken_numbers_special_tokens_first(tmp_path):
    ranks = trained()
    (tmp_path / "tekken.json").write_text(json.dumps(tekken(ranks)))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    vocabulary = PublishedVocabulary(tmp_path)
    assert (vocabulary.size, vocabulary.before) == (10 + len(ranks), (1,))
    for text in TRICKY:
        expected = [10 + index for index in encode_by_loops(ranks, TEKKEN, text)]
        assert vocabulary.encode(text) == expected, text
        assert vocabulary.decode([1, *expected, 2]) == text
    assert vocabulary.encode("[INST]a[/INST]") == [3, 10 + ord("a"), 4]
    (other,) = others.of_others(str(tmp_path / "tekken.json"))
    assert other.encode(LINES[0]) == vocabulary.encode(LINES[0]) and other.eos_id == 2
    # A text of its own never gives a special token.
    assert 3 not in other.encode("[INST]")


def test_older_files_of_tekken_do_not_list_special_tokens(tmp_path):
    content = tekken(trained(), special=30)
    del content["special_tokens"]
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    vocabulary = PublishedVocabulary(tmp_path)
    assert vocabulary.encode("[SYSTEM_PROMPT]a") == [17, 30 + ord("a")]
    assert vocabulary.size == 30 + len(trained())


def test_whispers_file_has_an_empty_token(tmp_path):
    ranks = {bytes([byte]): byte for byte in range(256)} | {b"th": 256}
    path = write_tiktoken(tmp_path / "multilingual.tiktoken", ranks)
    with open(path, "a") as file:
        file.write("= 50256\n")
    (found,) = others.of_others(path)
    assert (found.size, found.eos_id) == (50258, 50257)
    assert found.encode("the") == [256, ord("e")]


def test_llama_3s_model_is_a_file_of_tiktoken(tmp_path):
    ranks = trained()
    write_tiktoken(tmp_path / "tokenizer.model", ranks)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": len(ranks) + 1}))
    vocabulary = PublishedVocabulary(tmp_path)
    assert (vocabulary.size, vocabulary.before) == (len(ranks) + 256, (len(ranks),))
    assert vocabulary.encode("<|eot_id|>") == [len(ranks) + 9]
    assert vocabulary.decode(vocabulary.encode(LINES[1])) == LINES[1]


def test_kimis_special_tokens_are_those_of_its_settings(tmp_path):
    ranks = trained()
    write_tiktoken(tmp_path / "tiktoken.model", ranks)
    first = len(ranks)
    settings = {"added_tokens_decoder": {str(first + 1): {"content": "[EOS]"}}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": first + 1}))
    vocabulary = PublishedVocabulary(tmp_path)
    assert (vocabulary.size, vocabulary.before) == (first + 2, ())
    assert vocabulary.encode("a[EOS]") == [ord("a"), first + 1]
    # Han characters are parts of their own.
    for text in TRICKY:
        assert vocabulary.decode(vocabulary.encode(text)) == text


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("mine.tiktoken", "IQ== 0\n", "its name is none of r50k_base.tiktoken"),
        ("cl100k_base.tiktoken", "no ranks\n", "the file has no ranks; lines of base64"),
        ("tekken.json", '{"config": {}, "vocab": []}', "this is no tekken.json: KeyError"),
    ],
)
def test_files_that_say_too_little_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=f"input.vocabulary.files: .*{name}: .*{message}"):
        others.of_others(str(tmp_path / name))


@pytest.mark.slow
def test_ids_are_those_of_tiktoken(tmp_path):
    python = find_python(os.environ.get("PEERS_PYTHON"), ("tiktoken",))
    if not python:
        pytest.skip("tiktoken is not installed, and PEERS_PYTHON names no Python with it")
    ranks, texts = trained(), [*TRICKY, *tricky_texts.texts()]
    known = byte_ranks.KNOWN.patterns
    setup = {
        "ranks": {base64.b64encode(token).decode(): rank for token, rank in ranks.items()},
        "names": list(byte_ranks.KNOWN.ids),
        "patterns": {"tekken": TEKKEN, "llama3": known["llama3"], "kimi": known["kimi"]},
        "texts": texts,
    }
    (tmp_path / "setup.json").write_text(json.dumps(setup))
    command = [python, "-c", PEER, str(tmp_path / "setup.json")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    expected = json.loads(done.stdout)
    for name, pattern in (known | setup["patterns"]).items():
        made = byte_ranks.tokenizer_json(ranks, pattern, {"</s>": len(ranks)})
        (tmp_path / "tokenizer.json").write_text(made)
        (vocabulary,) = others.of_others(str(tmp_path / "tokenizer.json"))
        for text, ids in zip(texts, expected[name], strict=True):
            assert vocabulary.encode(text) == ids, (name, text)
