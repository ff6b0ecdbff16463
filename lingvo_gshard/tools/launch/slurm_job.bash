#!/bin/bash
@settings@

# Slurm signals this shell before the time limit and when it preempts the job. The agents have the
# workers save.
stop() {
    reason=$1
    scancel --signal=USR1 "$SLURM_JOB_ID"
}
trap 'stop limit' USR1
trap 'stop preempted' TERM

# A job that is queued again may get fewer nodes than it first asked for.
srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=0 --no-kill --wait=0 \
    bash -c @keep@ agent \
    @agent@ &
agents=$!
# A signal ends `wait` early.
while wait "$agents"; code=$?; kill -0 "$agents" 2>/dev/null; do :; done

if [ "$reason" = limit ] && [ "$code" -ne 0 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
