#!/bin/sh
# What glm_scale.sh submits: itself, without #SBATCH lines, of which sbatch would keep those that its arguments do not name.
exec "${MEGASAO_HOME:-$SLURM_SUBMIT_DIR}/slurm/glm_scale.sh" "$@"
