#!/usr/bin/env bash
# One agent on each node under torchrun. Run this on every node, with the same values but NODE:
#
#   NODES=2 NODE=0 MASTER_ADDR=10.0.0.1 CONFIG=run.toml RUN=/shared/runs/one deploy/torchrun.sh
#
# The folder of RUN is on a disk that all nodes share. torchrun passes SIGTERM on and kills what is left 30 s later, so
# longer `world.grace` and `save.grace_seconds` are of no use here. torchrun's own exit code is 0 or 1, whatever the
# agents': `dynatrain status` tells how the run has ended.
set -euo pipefail
: "${NODES:?}" "${NODE:?}" "${MASTER_ADDR:?}" "${CONFIG:?}" "${RUN:?}"

exec torchrun --nnodes="$NODES" --nproc-per-node=1 --node-rank="$NODE" \
  --master-addr="$MASTER_ADDR" --master-port="${MASTER_PORT:-29500}" \
  -m -- dynatrain train "$CONFIG" --run "$RUN"
