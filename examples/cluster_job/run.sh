#!/usr/bin/env bash
# Trains in two processes on this machine, which share eight virtual devices.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
logdir=${LOGDIR:-runs/cluster}
port=${PORT:-8476}

train() {
  gshard-train --experiment=translation.quickstart --logdir="$logdir" --steps="${STEPS:-20}" \
    --runtime=spmd --mesh=data=8 --strategy=expert \
    --coordinator="127.0.0.1:$port" --num_processes=2 --process_id="$1" \
    --gin_param='input.languages = ("gl",)' --gin_param='input.vocabulary.size = 1000' \
    --gin_param='task.model_dim = 32' --gin_param='task.encoder.num_layers = 2' \
    --gin_param='task.decoder.num_layers = 1' --gin_param='task.decoder.moe_every = 0'
}

train 1 >/dev/null &
train 0
wait $!
