#!/usr/bin/env bash
# Trains, evaluates and plans the task, and goes on over eight devices.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
logdir=${LOGDIR:-runs/sorting}
steps=${STEPS:-300}

gshard-train --experiment=sorting.experiment.small --logdir="$logdir" --steps="$steps"
gshard-evaluate --logdir="$logdir" --import=sorting.experiment
gshard-plan --experiment=sorting.experiment.small --topology=cpu:8 --json="$logdir/plan.json"
gshard-train --logdir="$logdir" --import=sorting.experiment --steps=$((steps + 2)) --mesh=data=8
