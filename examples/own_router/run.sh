#!/usr/bin/env bash
# Tests the router, and trains with it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

python -m pytest -q test_nearest_router.py
gshard-train --experiment=translation.quickstart --logdir="${LOGDIR:-runs/nearest}" --steps="${STEPS:-100}" \
  --gin_param='task.encoder.moe.router = @nearest_router.NearestRouter' \
  --gin_param='input.languages = ("gl",)' --gin_param='input.vocabulary.size = 1000' \
  --gin_param='task.model_dim = 32' --gin_param='task.encoder.num_layers = 2' \
  --gin_param='task.decoder.num_layers = 1' --gin_param='task.decoder.moe_every = 0'
