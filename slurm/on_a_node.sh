# shellcheck shell=bash
# Sourced by scripts that run one command of megasao on one node: on_a_node HOME COMMAND ARGUMENTS...
# Outside of a job HOME/slurm/COMMAND.sh is submitted; in a job the command runs, with the Python of slurm/site.env.

fail() {
    echo "slurm: $1" >&2
    exit 2
}

on_a_node() {
    local home=$1 command=$2 arguments=()
    shift 2
    export MEGASAO_HOME=$home
    local site=${MEGASAO_SITE:-$home/slurm/site.env}
    [ -r "$site" ] || fail "$site cannot be read: it says what the cluster is like, see slurm/README.md"
    set -a
    # shellcheck source=slurm/site.env
    . "$site"
    set +a
    [ -x "${MEGASAO_PYTHON:-}" ] || fail "$site: MEGASAO_PYTHON=${MEGASAO_PYTHON:-} is no program on $(uname -n)"
    if [ $# -eq 0 ]; then
        "$MEGASAO_PYTHON" -P -m megasao "$command" --help >&2
        fail "$command.sh: nothing was submitted; give it the arguments of \`megasao $command\`"
    fi
    if [ -n "${SLURM_JOB_ID:-}" ]; then
        # Words as a shell would read them, as everywhere for these variables.
        eval "arguments=(${MEGASAO_SRUN_ARGS:-} ${MEGASAO_STEP_COMMAND:-})"
        exec srun --nodes=1 --ntasks=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --input=none --unbuffered \
            "${arguments[@]}" "${MEGASAO_STEP_PYTHON:-$MEGASAO_PYTHON}" -P -m megasao "$command" "$@"
    fi
    eval "arguments=(${MEGASAO_SBATCH_ARGS:-})"
    [ -z "${MEGASAO_PARTITION:-}" ] || arguments+=("--partition=$MEGASAO_PARTITION")
    [ -z "${MEGASAO_ACCOUNT:-}" ] || arguments+=("--account=$MEGASAO_ACCOUNT")
    exec sbatch "${arguments[@]}" "$home/slurm/$command.sh" "$@"
}
