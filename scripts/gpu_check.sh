#!/usr/bin/env bash
# Checks this repository's claims on your GPUs, in calls of at most nine minutes, and keeps the results in one archive.
#
#   scripts/gpu_check.sh [OUT_DIR]          default: results/gpu_check_<gpu>_<date>, and OUT_DIR.tar.gz next to it
#
# Call it again with the same OUT_DIR until it says that nothing is left: each call continues where the last one ended,
# even within a comparison, and even from the unpacked archive of another machine. scripts/gpu_check.py lists the steps,
# the most telling first.
#
# Results are written as they are measured. The archive is rewritten after each step, once per minute, and at the end:
# rows, records, figures, and the logs of what failed, without host name, folders and UUIDs. At the end the script
# prints predicted against measured memory, warm against cold launch, fidelity, and what to check now.
# Exit code: 0 if every step of this call ended with 0, 1 otherwise, 2 if a run would be refused here.
#
# Nothing is downloaded: models are built from presets. Missing packages can be supplied as wheels in WHEELS, which
# scripts/make_wheels.sh fills, or in a folder on PYTHONPATH.
#
# Environment, all optional:
#   PYTHON            the interpreter              (.venv/bin/python, else python3)
#   WHEELS            folder of wheels to install, without network, into a folder of their own in ~/.cache
#   STEPS             only these, even if they are done, e.g. "gpt2 fidelity"; "gpt2" selects gpt2-zero and gpt2-offload
#   NVME_PATH         folder on an NVMe disk
#   NUM_GPUS          GPUs to use                  (all)
#   BUDGET_SECONDS    time limit of this call      (540)
#   ARCHIVE           the archive file             (OUT_DIR.tar.gz)
#   GPU_CHECK_MODELS  three presets                (gpt2, Llama-3.2-1B, Llama-2-7b; Llama-3.2-3B below 100 GB per GPU)
#   GPU_CHECK_ACCELERATOR=cpu  exercises the plumbing without a GPU, in small sizes; the output is labeled CPU
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$([[ -x $ROOT/.venv/bin/python ]] && echo "$ROOT/.venv/bin/python" || echo python3)}
export PYTHON HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1

# Into one folder for all calls: ops are built again if DeepSpeed is in a different folder or has been reinstalled.
if [[ -n ${WHEELS:-} ]]; then
    key=$({ cat "$WHEELS"/*.whl && "$PYTHON" -c 'import sys; print(sys.version, sys.prefix)'; } | sha256sum | cut -c1-16)
    site=${XDG_CACHE_HOME:-${HOME:-/tmp}/.cache}/ds_bench/gpu_check/$key
    if [[ ! -d $site ]]; then
        "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$site.$$" "$WHEELS"/*.whl || exit 2
        mv -T "$site.$$" "$site" 2>/dev/null || rm -rf "$site.$$" # another call was first
    fi
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH} PATH=$site/bin:$PATH # ninja is a program
fi
exec "$PYTHON" "$ROOT/scripts/gpu_check.py" "$@"
