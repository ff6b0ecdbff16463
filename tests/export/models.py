"""Exports of small models, and the answers that a run gives."""

import json

import lingvo_gshard as gshard
from lingvo_gshard.wings.inference.options import DecodingOptions
from lingvo_gshard.wings.inference.text_generator import TextGenerator

# Texts of several lengths; among them an empty one, and one that is not in the normal form.
SENTENCES = ["der Hund sieht das Haus", "", "le  chat\u200b mange\tdu pain", "Wasser", "rot grün"]
BEGINNINGS = ["the dog", "", "the cat sees the house", "water\tbread"]
# The models were trained for a few steps, and would end some texts at once.
_LEAST_TOKENS = 2


def export(logdir, output, format, beam_size, rows, lengths):
    """Exports a run."""
    options = DecodingOptions(beam_size=beam_size, least_tokens=_LEAST_TOKENS)
    settings = gshard.DecoderSettings(options, rows, lengths)
    return gshard.load(logdir).export(output, format, settings)


def translations(logdir, sentences, beam_size):
    """Returns what the run answers to sentences."""
    run = gshard.load(logdir)
    return run.translate(sentences, beam_size=beam_size, least_tokens=_LEAST_TOKENS)


def continuations(logdir, beginnings, beam_size):
    """Returns the texts with which the run continues beginnings."""
    run = gshard.load(logdir)
    options = DecodingOptions(beam_size=beam_size, least_tokens=_LEAST_TOKENS)
    generator = TextGenerator(run.decoder.engine, run.input.vocabulary, options)
    return [text.texts[0] for text in generator.write(beginnings)]


# Answers each request in a list of [directory, texts]; needs `answer(directory, texts)`.
ANSWER_ALL = """
import json, sys
print(json.dumps([answer(*request) for request in json.loads(sys.argv[1])]))
"""


def requests(*pairs):
    """Returns requests as an argument of a program that ends with ANSWER_ALL."""
    return json.dumps([[str(directory), texts] for directory, texts in pairs])
