#!/usr/bin/env bash
# Exports the step and plans it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
topology=${TOPOLOGY:-cpu:8}
case $topology in
  cpu:*) platform=cpu ;;
  gpu:*) platform=cuda ;;
  *) platform=tpu ;;
esac
out=${LOGDIR:-runs/plan}

mkdir -p "$out"
python export_step.py "$out/step.bin" "$platform"
gshard-plan "$out/step.bin" --topology="$topology" --step_tokens=64 --json="$out/plan.json" --html="$out/plan.html"
