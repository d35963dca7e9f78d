#!/usr/bin/env bash
#SBATCH --signal=B:USR1@900
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
#SBATCH --job-name=glm-5-2 --nodes=1 --ntasks-per-node=1 --cpus-per-task=4 --mem=16G --time=2880
#SBATCH hetjob
#SBATCH --job-name=glm-5-2 --nodes=32 --ntasks-per-node=8 --cpus-per-task=8 --mem=0 --time=2880 --gres=gpu:8
#SBATCH hetjob
#SBATCH --job-name=glm-5-2 --nodes=32 --ntasks-per-node=1 --cpus-per-task=24 --mem=0 --time=2880 --gres=gpu:8

# A run on a Slurm cluster: slurm/glm_scale.sh [--resume] [CONFIG] [key=value ...]
#
# Called by itself it submits itself with the nodes that CONFIG needs. Submitted (sbatch slurm/glm_scale.sh ...) it runs
# the job on what it was given, if that fits. The lines above are those of the default CONFIG. slurm/README.md says more.
set -euo pipefail

fail() {
    echo "glm_scale.sh: $1" >&2
    exit 2
}

# Slurm runs a copy of this file, so inside a job its place says nothing.
if [ -n "${SLURM_JOB_ID:-}" ]; then
    home=${MEGASAO_HOME:-$SLURM_SUBMIT_DIR}
else
    home=${MEGASAO_HOME:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
fi
[ -f "$home/slurm/glm_scale.sh" ] || fail "$home is not the repository: submit from there, or set MEGASAO_HOME"
export MEGASAO_HOME=$home
site=${MEGASAO_SITE:-$home/slurm/site.env}
[ -r "$site" ] || fail "$site cannot be read: it says what the cluster is like, see slurm/README.md"
set -a
# shellcheck source=slurm/site.env
. "$site"
set +a
[ -x "${MEGASAO_PYTHON:-}" ] || fail "$site: MEGASAO_PYTHON=${MEGASAO_PYTHON:-} is no program on $(uname -n)"
cd "$home"

options=()
if [ "${1:-}" = --resume ]; then
    options=(--resume)
    shift
fi
[ $# -gt 0 ] || set -- configs/glm_5_2_750b.yaml

if [ -n "${SLURM_JOB_ID:-}" ]; then
    trap '' USR1 # until the launcher has a handler of its own
    exec "$MEGASAO_PYTHON" -P -m megasao slurm-job "${options[@]}" -- "$@"
fi
plan=$("$MEGASAO_PYTHON" -P -m megasao slurm --arguments -- "$@")
mapfile -t arguments <<<"$plan"
exec sbatch "${arguments[@]}" slurm/job.sh "${options[@]}" "$@"
