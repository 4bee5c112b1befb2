#!/usr/bin/env bash
# Installs the system packages that `make demo` and `make test` need and that this machine lacks.
#
#   scripts/install_system_packages.sh base    a C++ compiler, Python's headers and its venv module
#   scripts/install_system_packages.sh test    libaio's headers (NVMe rows), Chromium and its driver (the HTML report),
#                                              iproute2, ssh and Slurm (runs on several hosts)
#
# It installs them with apt-get if it runs as root. Otherwise it prints one line that says what to install. Without the
# packages of `test`, the tests that need them are skipped. Exit code: 1 if a package of `base` is missing, else 0.
# The daemons among the packages (sshd, munged, slurmctld, slurmd) are started only by the tests, neither by the
# installation nor at boot.
set -uo pipefail
PYTHON=${PYTHON:-python3}

has_header() { "${CXX:-c++}" -E -x c++ - <<<"#include <$1>" >/dev/null 2>&1; }
has_venv() { "$PYTHON" -c 'import ensurepip, venv' >/dev/null 2>&1; }
has_python_headers() {
    "$PYTHON" -c 'import pathlib, sys, sysconfig
sys.exit(not (pathlib.Path(sysconfig.get_path("include")) / "Python.h").is_file())' 2>/dev/null
}
has_browser() {
    command -v chromedriver >/dev/null && { command -v chromium || command -v google-chrome; } >/dev/null
}

# Adds to `missing` the package of each COMMAND:PACKAGE whose command is not found.
add_missing() {
    local pair
    for pair in "$@"; do
        command -v "${pair%%:*}" >/dev/null || missing+=("${pair#*:}")
    done
}

# Installs packages; their daemons are neither started (invoke-rc.d and systemd's helper ask the policy) nor enabled.
install_packages() {
    local policy=/usr/sbin/policy-rc.d package
    if [[ ! -e $policy ]]; then
        trap 'rm -f /usr/sbin/policy-rc.d' EXIT
        printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod 755 "$policy"
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
    command -v systemctl >/dev/null || return 0
    for package in "$@"; do
        case $package in
        openssh-server) systemctl disable --quiet ssh.service ;;
        munge | slurmctld | slurmd) systemctl disable --quiet "$package.service" ;;
        esac
    done
}

# The Debian packages of one group that are missing here, on one line.
missing_packages() {
    local -a missing=()
    case $1 in
    base)
        command -v "${CXX:-c++}" >/dev/null || missing+=(g++)
        has_venv || missing+=(python3-venv)
        has_python_headers || missing+=(python3-dev)
        ;;
    test)
        has_header libaio.h || missing+=(libaio-dev)
        has_browser || missing+=(chromium chromium-driver fonts-dejavu-core)
        add_missing ip:iproute2 ssh:openssh-client sshd:openssh-server munged:munge slurmctld:slurmctld slurmd:slurmd
        ;;
    *)
        echo "usage: $0 base|test" >&2
        exit 2
        ;;
    esac
    echo "${missing[*]}"
}

group=${1:-}
packages=$(missing_packages "$group") || exit 2
if [[ -n $packages && $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    echo "installing system packages: $packages" >&2
    # shellcheck disable=SC2086  # one word per package
    install_packages $packages >&2 </dev/null
    packages=$(missing_packages "$group")
fi
[[ -z $packages ]] && exit 0
case $group in
base)
    echo "missing system packages; install them first (Debian names): apt-get install $packages" >&2
    exit 1
    ;;
test)
    echo "the tests that need these are skipped; to run them (Debian names): apt-get install $packages" >&2
    ;;
esac
