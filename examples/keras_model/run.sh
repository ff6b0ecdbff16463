#!/usr/bin/env bash
# Trains, and goes on with the same command.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
directory=${LOGDIR:-runs/rows}
epochs=${EPOCHS:-10}

mkdir -p "$directory"
python train.py "$directory" $((epochs / 2))
python train.py "$directory" "$epochs"
