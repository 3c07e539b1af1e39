#!/usr/bin/env bash
#SBATCH --job-name=dynatrain
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
#
# One agent on each node of a Slurm job:  CONFIG=run.toml RUN=/shared/runs/one sbatch deploy/slurm.sh
#
# - The folder of RUN is on a disk that all nodes share.
# - --signal: 120 s before the time limit all steps, and so all agents, get SIGTERM: the run stops saved, with 75, and
#   the job is queued again. Set `[save] grace_seconds = 100`.
# - --kill-on-bad-exit=0: an agent whose host is drained ends before the others, and must not take them with it.
# - A preempted node's SIGTERM reaches its agent alone: its host is drained within `world.grace`.
set -uo pipefail
: "${CONFIG:?}" "${RUN:?}"

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export CONFIG RUN MASTER_ADDR MASTER_PORT

trap : TERM # the agents are told as well, and this shell has to see how they end
# exec: the signal is for the agent, and no shell stands in between.
srun --kill-on-bad-exit=0 bash -c \
  'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS exec dynatrain train "$CONFIG" --run "$RUN"'
code=$?

if [[ $code -eq 75 ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
