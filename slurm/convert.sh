#!/usr/bin/env bash
#SBATCH --job-name=megasao-convert --nodes=1 --ntasks=1 --cpus-per-task=16 --mem=64G --time=1440
#SBATCH --output=slurm-%j.out --open-mode=append --requeue

# A checkpoint converted, quantised or compared on one node: slurm/convert.sh COMMAND ARGUMENTS..., those of
# `megasao convert` (docs/checkpoints.md). Requeued, it goes on with the files that are not finished.
# Called by itself it submits itself; `sbatch [options] slurm/convert.sh ...` asks for another node than the lines above.
set -euo pipefail
# Slurm runs a copy of this file, so inside a job its place says nothing.
if [ -n "${SLURM_JOB_ID:-}" ]; then
    home=${MEGASAO_HOME:-$SLURM_SUBMIT_DIR}
else
    home=${MEGASAO_HOME:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
fi
if [ ! -f "$home/slurm/on_a_node.sh" ]; then
    echo "convert.sh: $home is not the repository: submit from there, or set MEGASAO_HOME" >&2
    exit 2
fi
# shellcheck source=slurm/on_a_node.sh
. "$home/slurm/on_a_node.sh"
on_a_node "$home" convert "$@"
