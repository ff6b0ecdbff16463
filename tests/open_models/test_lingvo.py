# tests: wings/open_models/lingvo.py, wings/open_models/starting.py
"""Tests checkpoints of Lingvo's GShard layers, written here by TensorFlow 1's saver.

The expected logits are computed in NumPy as gshard_builder.py and gshard_layers.py of Lingvo define
UniTransformer, from the variables under their names there.
"""

import pathlib
import shlex

import numpy as np
import pytest
import tensorflow as tf

import lingvo_gshard as gshard
from lingvo_gshard.core import UserError, context
from lingvo_gshard.layers.embedding import LearnedPositions
from lingvo_gshard.tools import train
from lingvo_gshard.training import experiments
from lingvo_gshard.wings.open_models.lingvo import is_lingvo
from lingvo_gshard.wings.open_models.starting import PublishedStart
from tests.test_docs import commands

M, N, D, H, E, V, BUCKETS = 8, 2, 4, 16, 4, 300, 8
IDS = [2, 5, 7, 4, 9, 20, 11, 5, 5, 30, 12, 8]
CORPUS = "".join(f"The file {i} of the house does not exist.\n\n" for i in range(200))


def variables(kind):
    """Returns name -> value of the weights of a model of two blocks, in Lingvo's shapes."""
    draw = np.random.default_rng(0)
    heads = (N * D,) if kind == "combined" else (N, D)
    shapes = {"dec_emb/w/embedding": (V, M), "decoder/final_layer_norm/w/scale": (M,)}
    if kind == "positions":
        shapes["dec_pos_emb/w/embedding"] = (64, M)
    for layer in range(4):
        path = f"decoder/layer_{layer:03d}"
        shapes[f"{path}/ln/w/scale"] = (M,)
        if layer % 2 == 0:
            shapes |= {f"{path}/dec_self_attention/w/{w}": (M, *heads) for w in ("wq", "wk", "wv")}
            shapes[f"{path}/dec_self_attention/w/wo"] = (*heads, M)
            if kind == "shared" and layer == 0:
                name = "wrb_dec_self_attention_shared_var/wrb"
                shapes[f"{path}/dec_self_attention/{name}"] = (N, BUCKETS)
            if kind in ("experts", "gated"):
                shapes[f"{path}/dec_self_attention/wrb/wrb"] = (N, BUCKETS)
            continue
        ins = ("wi_0", "wi_1") if kind == "gated" else ("wi",)
        if layer == 1 and kind in ("experts", "gated"):
            shapes |= {f"{path}/moe/moe/{wi}": (E, M, H) for wi in ins}
            shapes[f"{path}/moe/moe/wo"] = (E, H, M)
            shapes[f"{path}/moe/ffw/top_2_gating/w"] = (M, E)
        else:
            shapes |= {f"{path}/dense_relu_dense/w/{wi}": (M, H) for wi in ins}
            shapes[f"{path}/dense_relu_dense/w/wo"] = (H, M)
    return {name: draw.normal(0, 0.7, shape).astype(np.float32) for name, shape in shapes.items()}


def write(prefix, values, task="1bwds/", others=()):
    """Writes weights, Adafactor's slots and averages of each, and other variables."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        made = [tf.compat.v1.get_variable("global_step", initializer=np.int64(7))]
        for name, value in values.items():
            full = f"{task}{name}/var"
            made.append(tf.compat.v1.get_variable(full, initializer=value))
            for slot in ("Adafactor", "Adafactor_1", "ExponentialMovingAverage"):
                made.append(tf.compat.v1.get_variable(f"{full}/{slot}", initializer=value * 0))
        made += [tf.compat.v1.get_variable(name, initializer=np.ones(3)) for name in others]
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.train.Saver(made).save(session, str(prefix), write_meta_graph=False)
    return prefix


def experiment(tmp_path, kind):
    """Returns the experiment of a model of Lingvo's layers."""
    (tmp_path / "corpus.txt").write_text(CORPUS)
    params = gshard.experiment("language_model.from_files", [f"input.vocabulary.size = {V}"])
    params.input.corpus.train = (str(tmp_path / "corpus.txt"),)
    params.input.vocabulary.set(cache_directory=str(tmp_path / "cache"))
    task = params.task
    task.set(model_dim=M, embedding_scale=1.0, logit_scale=M**-0.5, vocabulary_size=V)
    task.decoder.set(num_layers=2, num_heads=N, hidden_dim=H, moe_every=0)
    task.decoder.layer.self_attention.set(query_scale=1.0, rotary_fraction=0.0)
    task.decoder.layer.feed_forward.activation = "swiglu" if kind == "gated" else "relu"
    if kind in ("experts", "gated"):
        task.decoder.set(moe_every=2, moe_offset=1)
        task.decoder.moe.set(num_experts=E, hidden_dim=H, group_size=len(IDS))
        task.decoder.moe.experts.activation = task.decoder.layer.feed_forward.activation
        task.decoder.moe.router.set(second_expert="all", evaluation_capacity_factor=float(E))
        task.decoder.layer.self_attention.set(relative_buckets=BUCKETS, relative_max_distance=20)
    if kind == "positions":
        task.set(add_positions=True, positions=LearnedPositions.params().set(max_length=64))
    if kind == "shared":
        task.decoder.shared_relative_bias.set(buckets=BUCKETS, max_distance=20)
    return params


def norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def bucket(distance):
    """Returns the bucket of a query that comes `distance` after a key."""
    exact = BUCKETS // 2
    if distance < exact:
        return distance
    return min(
        exact + int(np.log(distance / exact) / np.log(20 / exact) * (BUCKETS - exact)), BUCKETS - 1
    )


def activated(x, weights, path):
    """Returns the hidden activations of a feed-forward layer, relu or gated silu."""
    if f"{path}/wi" in weights:
        return np.maximum(x @ weights[f"{path}/wi"], 0)
    inner = x @ weights[f"{path}/wi_0"]
    return inner / (1 + np.exp(-inner)) * (x @ weights[f"{path}/wi_1"])


def expected(weights, kind):
    """Returns the logits [L,V] of IDS."""
    x = weights["dec_emb/w/embedding"][IDS].astype(np.float64)
    length = len(IDS)
    if kind == "positions":
        x += weights["dec_pos_emb/w/embedding"][:length]
    late = np.triu(np.full((length, length), -1e9), 1)
    biases = [v for name, v in weights.items() if name.endswith("/wrb")]
    for layer in range(4):
        path = f"decoder/layer_{layer:03d}"
        h = norm(x, weights[f"{path}/ln/w/scale"])
        if layer % 2 == 0:
            q, k, v = (
                h @ weights[f"{path}/dec_self_attention/w/{w}"].reshape(M, N * D)
                for w in ("wq", "wk", "wv")
            )
            q, k, v = (each.reshape(length, N, D) for each in (q, k, v))
            logits = np.einsum("lnd,knd->nlk", q, k) + late
            if biases:
                bias = biases[layer // 2 % len(biases)]
                where = [[bucket(max(i - j, 0)) for j in range(length)] for i in range(length)]
                logits += bias[:, where]
            out = np.einsum("nlk,knd->lnd", softmax(logits), v).reshape(length, N * D)
            x = x + out @ weights[f"{path}/dec_self_attention/w/wo"].reshape(N * D, M)
            continue
        if f"{path}/moe/moe/wo" not in weights:
            inner = activated(h, weights, f"{path}/dense_relu_dense/w")
            x = x + inner @ weights[f"{path}/dense_relu_dense/w/wo"]
            continue
        gates = softmax(h @ weights[f"{path}/moe/ffw/top_2_gating/w"])
        added = []
        for token, gate in zip(h, gates, strict=True):
            best = np.argsort(-gate)[:2]
            outs = []
            for e in best:
                own = {n: w[e] for n, w in weights.items() if n.startswith(f"{path}/moe/moe/")}
                outs.append(activated(token, own, f"{path}/moe/moe") @ own[f"{path}/moe/moe/wo"])
            added.append(gate[best] @ np.array(outs) / gate[best].sum())
        x = x + np.array(added)
    x = norm(x, weights["decoder/final_layer_norm/w/scale"]) * M**-0.5
    return x @ weights["dec_emb/w/embedding"].T


@pytest.mark.parametrize("kind", ["dense", "combined", "experts", "gated", "shared", "positions"])
def test_logits_are_those_of_lingvos_layers(tmp_path, kind):
    weights = variables(kind)
    prefix = write(tmp_path / "ckpt-00000007", weights)
    params, said = experiment(tmp_path, kind), []
    assert is_lingvo(prefix) and not is_lingvo(tmp_path)
    start = PublishedStart(prefix, params, said.append)
    others = f"{1 + 3 * len(weights)} variables of the optimizer and moving averages are left out"
    assert said == [others]
    trainer = experiments.make_trainer(params, params.task)
    theta = start.checkpoint(trainer, None).theta
    tree = trainer.theta_specs
    assert set(theta) == {path for path, _ in tree.flatten_items()}
    row = tf.constant([IDS], tf.int32)
    batch = {"target_inputs": row, "target_segments": tf.ones_like(row)}
    batch["target_positions"] = tf.range(len(IDS))[None]
    filled = tree.transform_with_path(
        lambda path, spec: tf.convert_to_tensor(np.asarray(theta[path]))
    )
    with context.scope(training=False):
        found = trainer.task.logits(filled, batch).numpy()[0]
    np.testing.assert_allclose(found, expected(weights, kind), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"decoder/layer_000/dec_self_attention/w/wz": (M,)},
            "decoder/layer_000/dec_self_attention/w/wz is unknown",
        ),
        ({"dec_emb/w/embedding": (V + 1, M)}, r"dec_emb/w/embedding is \(301, 8\); \(300, 8\) was"),
        ({"decoder/layer_004/ln/w/scale": (M,)}, "decoder/layer_004/ln/w/scale is unknown"),
        ({"decoder/final_layer_norm/w/scale": None}, "decoder/final_layer_norm/w/scale is missing"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, change, message):
    weights = variables("dense")
    for name, shape in change.items():
        weights[name] = None if shape is None else np.ones(shape, np.float32)
    weights = {name: value for name, value in weights.items() if value is not None}
    prefix = write(tmp_path / "ckpt-7", weights)
    with pytest.raises(UserError, match=message):
        PublishedStart(prefix, experiment(tmp_path, "dense"), print)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ("encoder/layer_000/ln/w/scale", "/var is of an encoder. Only models of decoder layers"),
        ("enc_emb/w/embedding", "/var is of an encoder. .* leave out `init_from`"),
        (
            "decoder/blocks/blocks_body/layer_000/ln/w/scale",
            r"/var is of repeated layers \(use_repeat_layer\). Write a checkpoint whose",
        ),
    ],
)
def test_models_that_are_not_read_say_what_to_do(tmp_path, other, message):
    prefix = write(tmp_path / "ckpt-00000007", {**variables("dense"), other: np.ones(M)})
    with pytest.raises(UserError, match=f"{prefix}: 1bwds/{other}{message}"):
        PublishedStart(prefix, experiment(tmp_path, "dense"), print)


def test_damaged_files_are_named(tmp_path):
    prefix = write(tmp_path / "ckpt-7", variables("dense"))
    params = experiment(tmp_path, "dense")
    data = tmp_path / "ckpt-7.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:100])
    start = PublishedStart(prefix, params, print)
    trainer = experiments.make_trainer(params, params.task)
    with pytest.raises(UserError, match=": the checkpoint cannot be read: "):
        start.checkpoint(trainer, None)
    (tmp_path / "ckpt-7.index").write_bytes(b"no index")
    with pytest.raises(UserError, match=f"{prefix}: the checkpoint cannot be read: "):
        PublishedStart(prefix, params, print)


def test_an_experiment_is_needed(tmp_path):
    prefix = write(tmp_path / "ckpt-7", variables("dense"))
    with pytest.raises(UserError, match="Checkpoints of Lingvo have none and need an `experiment`"):
        train.main(["gshard-train", f"--init_from={prefix}", f"--logdir={tmp_path / 'run'}"])


def test_an_unknown_variable_without_var_is_named(tmp_path):
    prefix = write(tmp_path / "ckpt-7", variables("dense"), others=["counts/words"])
    with pytest.raises(UserError, match=f"{prefix}: .*counts/words is unknown"):
        PublishedStart(prefix, experiment(tmp_path, "dense"), print)


def test_the_command_of_the_page(tmp_path, monkeypatch):
    weights = variables("dense")
    write(tmp_path / "ckpt-00100000", weights)
    params = experiment(tmp_path, "dense")
    vocabulary = params.input.instantiate().vocabulary
    (tmp_path / "sentencepiece.model").write_bytes(vocabulary.model)
    monkeypatch.chdir(tmp_path)
    page = (pathlib.Path(__file__).parents[2] / "docs" / "coming_from.md").read_text()
    (command,) = [each for each in commands(page) if "--init_from=ckpt-" in each]
    sizes = [
        f"--gin_param=task.decoder.{n} = {v}"
        for n, v in (("num_layers", 2), ("num_heads", N), ("hidden_dim", H), ("moe_every", 0))
    ]
    train.main(
        [
            *shlex.split(command),
            "--steps=1",
            f"--gin_param=task.model_dim = {M}",
            f"--gin_param=task.logit_scale = {M**-0.5}",
            "--step.schedule.learning_rate=1e-9",
            *sizes,
        ]
    )
    run = gshard.load(tmp_path / "runs" / "from_lingvo")
    found = run.model.theta.embedding.table
    np.testing.assert_allclose(found, weights["dec_emb/w/embedding"], atol=1e-5)
