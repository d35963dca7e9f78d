#!/bin/sh
# Install Slurm's daemons and commands, munge and shellcheck on Debian, for tests/slurm and `make lint`. Starts nothing.
# Where that cannot be done it says why, and ends well: the tests are skipped then.
if [ "$(id -u)" != 0 ] || [ ! -f /etc/debian_version ]; then
    echo "Slurm is not installed, and installing it needs root on Debian: tests/slurm will be skipped"
    exit 0
fi
# Debian starts a daemon where it installs it, unless a policy forbids that.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
export DEBIAN_FRONTEND=noninteractive
timeout 300 apt-get update -qq &&
    timeout 600 apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge shellcheck >/dev/null ||
    echo "Slurm could not be installed (see above): tests/slurm will be skipped"
