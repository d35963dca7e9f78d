#!/bin/sh
# Install bubblewrap and podman on Debian, for what untrusted code runs in and its tests. Starts nothing.
# Where that cannot be done it says why, and ends well: the tests are skipped then.
if [ "$(id -u)" != 0 ] || [ ! -f /etc/debian_version ]; then
    echo "bubblewrap or podman is missing, and installing them needs root on Debian: their tests will be skipped"
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
# runc, where control groups of both versions are mounted: crun knows one of them at a time.
timeout 300 apt-get update -qq &&
    timeout 600 apt-get install -y -qq --no-install-recommends bubblewrap podman runc >/dev/null ||
    echo "bubblewrap and podman could not be installed (see above): their tests will be skipped"
