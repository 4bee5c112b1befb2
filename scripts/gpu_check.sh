#!/usr/bin/env bash
# Measures on your GPUs what this repository claims, and gathers it in one small, flat folder.
#
#   scripts/gpu_check.sh [OUT_DIR]          default: results/gpu_check_<gpu>_<date>
#
# Steps, the most telling first; MODEL is the last part of a model's name (gpt2, opt-1.3b, Llama-2-7b-hf):
#
#   MODEL-zero, MODEL-offload   both comparisons of each model, NVMe among them when NVME_PATH is set
#   fidelity                    bench/fidelity.py: the product beside a bare DeepSpeed loop, first model
#   prediction                  bench/prediction.py: predicted against measured memory, first model
#   launch-warm, launch-cold    the first model with each --launcher; step times and their ratio in summary.txt
#   tests                       pytest -m gpu
#
# A step that fails does not stop the others; OUT_DIR/steps.json has each one's exit code, start and duration.
# Run again with the same OUT_DIR, the script adds to it. Host name, home, serial numbers and UUIDs are left out.
# Exit code: 0 when every step that was run ended with 0, 1 otherwise, 2 where no GPU is visible.
#
# Environment, all optional:
#   PYTHON            the interpreter              (.venv/bin/python, else python3)
#   STEPS             only these, e.g. "gpt2 fidelity"; "gpt2" stands for gpt2-zero and gpt2-offload
#   NVME_PATH         folder on an NVMe disk
#   NUM_GPUS          GPUs to use                  (all)
#   BUDGET_SECONDS    starts no step after that; the step then running gets what is left
#   GPU_CHECK_MODELS  presets                      (gpt2 facebook/opt-1.3b meta-llama/Llama-2-7b-hf)
#   GPU_CHECK_ACCELERATOR=cpu  exercises the plumbing without a GPU, in small sizes; the output is labelled CPU
set -uo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ACCELERATOR=${GPU_CHECK_ACCELERATOR:-cuda}
read -r -a MODELS <<<"${GPU_CHECK_MODELS:-gpt2 facebook/opt-1.3b meta-llama/Llama-2-7b-hf}"
FIRST=${MODELS[0]}
FIRST_SHORT=${FIRST##*/}
BUDGET_SECONDS=${BUDGET_SECONDS:-}
LOG_BYTES=200000
FAILED=0

find_python() {
    if [[ -n ${PYTHON:-} ]]; then
        return
    elif [[ -x $ROOT/.venv/bin/python ]]; then
        PYTHON=$ROOT/.venv/bin/python
    else
        PYTHON=python3
    fi
}

# The name of the first visible GPU; nothing where there is none, or no torch for it.
gpu_name() {
    "$PYTHON" -c 'import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else "")' 2>/dev/null |
        tail -n 1
}

# "NVIDIA A100-SXM4-80GB" to "a100-sxm4-80gb"
slug() {
    tr '[:upper:]' '[:lower:]' <<<"$1" | sed -E 's/^nvidia +//; s/[^a-z0-9]+/-/g; s/^-+|-+$//g'
}

require_device() {
    if [[ $ACCELERATOR == cpu ]]; then
        DEVICE=cpu
        return
    fi
    local name
    name=$(gpu_name)
    if [[ -z $name ]]; then
        echo "gpu_check: no GPU is visible to torch of $PYTHON; check nvidia-smi, CUDA_VISIBLE_DEVICES and that" \
            "torch is a CUDA build" >&2
        exit 2
    fi
    DEVICE=$(slug "$name")
}

say() { echo "$*" | tee -a "$OUT/summary.txt"; }

# nvidia-smi -q without what names a card or its users: serial numbers, UUIDs, bus addresses, processes.
save_nvidia_smi() {
    [[ $ACCELERATOR == cuda ]] && command -v nvidia-smi >/dev/null || return 0
    nvidia-smi -q |
        sed -E -e '/^ *Processes/,/^GPU /{/^GPU /!d}' \
            -e '/Serial|UUID|GUID|PDI|Board ID|Bus Id|Host ID|Chassis|Slot Number|Tray Index|MAC/d' \
            -e 's/^GPU [0-9A-Fa-f:.]+$/GPU/' >"$OUT/nvidia_smi.txt"
}

# What a file says of this machine and its user: host name, folders, UUIDs.
scrub() {
    local home=${HOME:-}
    ((${#home} > 1)) || home=$WORK
    sed -i -E -e "s|$WORK|WORK|g; s|$ROOT|.|g; s|$home|~|g" \
        -e 's/"hostname": ?"[^"]*"/"hostname": "-"/g; s/ hostname="[^"]*"/ hostname="-"/g' \
        -e 's/(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}/\1-UUID/g' "$@"
}

wanted() {
    local step=$1 word
    [[ -z ${STEPS:-} ]] && return 0
    for word in $STEPS; do
        [[ $step == "$word" || $step == "$word"-* ]] && return 0
    done
    return 1
}

step_names() {
    local model
    echo fidelity prediction launch-warm launch-cold tests
    for model in "${MODELS[@]##*/}"; do
        echo "$model-zero" "$model-offload"
    done
}

check_steps() {
    local word name
    local -a names
    read -r -d '' -a names < <(step_names)
    for word in ${STEPS:-}; do
        for name in "${names[@]}"; do
            [[ $name == "$word" || $name == "$word"-* ]] && continue 2
        done
        echo "gpu_check: STEPS names '$word'; there are: ${names[*]}" >&2
        exit 2
    done
}

seconds_left() {
    [[ -z $BUDGET_SECONDS ]] && echo 999999 && return
    echo $((BUDGET_SECONDS - SECONDS))
}

# record STEP STARTED SECONDS CODE LIMIT: into steps.json, in place of an earlier entry of that name.
record() {
    "$PYTHON" - "$OUT/steps.json" "$ACCELERATOR" "$@" <<'PY'
import json, sys
from pathlib import Path
path, accelerator, name, started, seconds, code, limit = sys.argv[1:]
path = Path(path)
steps = json.loads(path.read_text()) if path.exists() else []
entry = {"name": name, "accelerator": accelerator, "started_at": started or None}
if code:
    entry |= {"seconds": int(seconds), "exit_code": int(code), "limit_seconds": int(limit), "timed_out": code in ("124", "137")}
else:
    entry |= {"skipped": "BUDGET_SECONDS was spent"}
path.write_text(json.dumps([s for s in steps if s["name"] != name] + [entry], indent=1) + "\n")
PY
}

meaning() {
    case "$1 $2" in
        "tests 5") echo " (no test is marked gpu)" ;;
        *" 124" | *" 137") echo " (its time was up)" ;;
    esac
}

# step NAME LIMIT_SECONDS COMMAND...: runs it unless it is not wanted or the budget is spent.
step() {
    local name=$1 limit=$2 left started begin code
    shift 2
    wanted "$name" || return 0
    left=$(seconds_left)
    if ((left < 30)); then
        say "$name: not started, the budget is spent"
        record "$name" "" "" "" ""
        return 0
    fi
    ((limit > left)) && limit=$left
    started=$(date -u +%Y-%m-%dT%H:%M:%SZ)
    begin=$SECONDS
    echo "== $name (at most $limit s)"
    mkdir -p "$WORK/$name"
    # In the foreground, so that Ctrl-C reaches the command; each clears up its own children.
    timeout --foreground -k 60 "$limit" "$@" 2>&1 | tee "$WORK/$name/log"
    code=${PIPESTATUS[0]}
    record "$name" "$started" $((SECONDS - begin)) "$code" "$limit"
    gather "$name"
    say "$name: exit code $code after $((SECONDS - begin)) s$(meaning "$name" "$code")"
    ((code == 0)) || FAILED=1
}

# The files of a step worth keeping, under the step's name.
gather() {
    local name=$1 file run
    tail -c "$LOG_BYTES" "$WORK/$name/log" >"$OUT/$name.log"
    for file in "$WORK/$name"/*_comparison_*.json "$WORK/$name"/*_comparison_*.csv; do
        [[ -e $file ]] && cp "$file" "$OUT/$name.${file##*.}"
    done
    for run in "$WORK/$name"/runs/*/; do
        for file in run.json records.jsonl; do
            [[ -e $run$file ]] && cp "$run$file" "$OUT/$name.$file"
        done
    done
    for file in "$WORK/$name"/figures.json "$WORK/$name"/junit.xml; do
        [[ -e $file ]] && cp "$file" "$OUT/$name.${file##*.}"
    done
    scrub "$OUT/$name".*
}

# Batch, sequence and steps of a model, as flags in SIZES; the time limit of one comparison in LIMIT.
sizes_of() {
    LIMIT=1800
    case $1 in
        *_cpu) SIZES=(--batch-size 2 --seq-length 64 --num-steps 5 --warmup-steps 2) ;;
        Llama-2-7b-hf_*)
            SIZES=(--batch-size 1 --seq-length 512 --num-steps 10 --warmup-steps 3)
            LIMIT=3600
            ;;
        opt-1.3b_*) SIZES=(--batch-size 8 --seq-length 512 --num-steps 20 --warmup-steps 5) ;;
        *) SIZES=(--batch-size 4 --seq-length 512 --num-steps 50 --warmup-steps 10) ;;
    esac
}

# compare NAME SCRIPT MODEL FLAG...: one comparison as a step.
compare() {
    local name=$1 script=$2 model=$3
    shift 3
    sizes_of "${model##*/}_$ACCELERATOR"
    step "$name" "$LIMIT" "$PYTHON" "$ROOT/$script" --model "$model" "${SIZES[@]}" "${DEVICES[@]}" \
        --output-dir "$WORK/$name" "$@"
}

zero() { compare "${1##*/}-zero" zero_stage_comparison.py "$1"; }

offload() {
    local strategies=(none cpu_optimizer cpu_full) nvme=()
    if [[ -n ${NVME_PATH:-} ]]; then
        strategies+=(nvme)
        nvme=(--nvme-path "$NVME_PATH")
    fi
    compare "${1##*/}-offload" offload_comparison.py "$1" --strategies "${strategies[@]}" "${nvme[@]}"
}

fidelity() {
    local rounds=5
    [[ $ACCELERATOR == cpu ]] && rounds=1
    sizes_of "${FIRST_SHORT}_$ACCELERATOR"
    step fidelity 1800 "$PYTHON" "$ROOT/bench/fidelity.py" --model "$FIRST" "${SIZES[@]}" "${DEVICES[@]}" \
        --rounds "$rounds" --launcher both --output "$WORK/fidelity/figures.json"
}

prediction() {
    sizes_of "${FIRST_SHORT}_$ACCELERATOR"
    step prediction 1800 "$PYTHON" "$ROOT/bench/prediction.py" --model "$FIRST" "${SIZES[@]}" "${DEVICES[@]}" \
        --output "$WORK/prediction/figures.json"
}

launches() {
    compare launch-warm zero_stage_comparison.py "$FIRST" --launcher warm
    compare launch-cold zero_stage_comparison.py "$FIRST" --launcher deepspeed
    [[ -e $OUT/launch-warm.json && -e $OUT/launch-cold.json ]] && show_launches | tee -a "$OUT/summary.txt"
    return 0
}

show_launches() {
    "$PYTHON" - "$OUT/launch-warm.json" "$OUT/launch-cold.json" <<'PY'
import json, sys
warm, cold = ({row["strategy"]: row for row in json.load(open(path)) if row["success"]} for path in sys.argv[1:])
print("step time by launch    warm ms    cold ms  warm/cold   start warm s   start cold s")
for name in [name for name in warm if name in cold]:
    a, b = warm[name], cold[name]
    times = a["avg_step_time_ms"], b["avg_step_time_ms"], a["avg_step_time_ms"] / b["avg_step_time_ms"]
    print(f"{name:<20} {times[0]:9.2f}  {times[1]:9.2f}  {times[2]:9.3f}   {a['start_seconds']:12.1f}   {b['start_seconds']:12.1f}")
PY
}

tests() { step tests 1800 "$PYTHON" -m pytest -m gpu -p no:cacheprovider --junit-xml "$WORK/tests/junit.xml"; }

run_steps() {
    local model
    zero "$FIRST"
    fidelity
    prediction
    launches
    offload "$FIRST"
    tests
    for model in "${MODELS[@]:1}"; do
        zero "$model"
        offload "$model"
    done
}

conclude() {
    local kept
    kept="results/reference/${DEVICE}_$(date -u +%Y%m%d)"
    say ""
    if [[ $ACCELERATOR == cpu ]]; then
        say "CPU run of the plumbing: these figures say nothing about GPUs; nothing here is to be committed."
    else
        say "To keep: mkdir -p $kept && cp $OUT/* $kept/ && git add $kept    ($(du -sh "$OUT" | cut -f1))"
    fi
    scrub "$OUT/summary.txt"
}

find_python
check_steps
require_device
OUT=${1:-$ROOT/results/gpu_check_${DEVICE}_$(date -u +%Y%m%d)}
mkdir -p "$OUT" || exit 2
OUT=$(cd "$OUT" && pwd)
WORK=$(mktemp -d) || exit 2
trap 'rm -rf "$WORK"' EXIT
trap 'exit 130' INT TERM
cd "$ROOT" || exit 2
DEVICES=(--accelerator "$ACCELERATOR")
[[ -n ${NUM_GPUS:-} ]] && DEVICES+=(--num-gpus "$NUM_GPUS")

say "gpu_check on ${DEVICE^^}, $(date -u +%Y-%m-%dT%H:%M:%SZ), models: ${MODELS[*]}"
[[ $ACCELERATOR == cpu ]] && say "CPU: these figures say nothing about GPUs"
save_nvidia_smi
run_steps
conclude
exit "$FAILED"
