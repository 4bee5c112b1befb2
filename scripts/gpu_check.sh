#!/usr/bin/env bash
# Measures on your GPUs what this repository claims, in chunks of at most nine minutes, into one small archive.
#
#   scripts/gpu_check.sh [OUT_DIR]          default: results/gpu_check_<gpu>_<date>, and OUT_DIR.tar.gz next to it
#
# One chunk after another, the most telling first, each with the same OUT_DIR, which every chunk adds to:
#
#   STEPS="probe gpt2-zero gpt2-offload"   STEPS=tests   STEPS="prediction references"   STEPS=fidelity
#   STEPS="launch opt-1.3b"   STEPS=llama2-7b-zero
#
# Steps; MODEL is a model's short name (gpt2, opt-1.3b, llama2-7b):
#
#   probe                       versions, op builds with times, may ranks be forked; then ten steps of each stage, tiny
#   MODEL-zero, MODEL-offload   both comparisons of each model, NVMe among them when NVME_PATH is set
#   fidelity                    bench/fidelity.py: the product next to a bare DeepSpeed loop, first model
#   references-bf16, references-fp32  the first model at ZeRO-0 and ZeRO-3 next to torch's DDP and FSDP2
#   axes-AXIS                   the first model with the values of an axis that acts only on GPUs, or differently there
#   prediction                  bench/prediction.py: predicted against measured memory, first model
#   launch-warm, launch-cold    the first model with each --launcher
#   tests                       pytest -m gpu
#
# Every step is capped by its own limit and by what is left of the budget. Results are gathered and the
# archive is rewritten after each step and when the script is ended, so a chunk that is cut short keeps what it finished.
# At the end the script prints predicted against measured, warm against cold, fidelity, and what to report.
# Host name, home, serial numbers and UUIDs are left out. OUT_DIR/steps.json has each step's exit code and seconds.
# Exit code: 0 when every step that was run ended with 0, 1 otherwise, 2 where no GPU is visible.
#
# Nothing is downloaded: models are built from presets. Missing packages may lie as wheels in WHEELS, which
# scripts/make_wheels.sh fills, or in a folder that PYTHONPATH names.
#
# Environment, all optional:
#   PYTHON            the interpreter              (.venv/bin/python, else python3)
#   WHEELS            folder of wheels to install, without network, into a folder of their own in ~/.cache
#   STEPS             only these, e.g. "gpt2 fidelity"; "gpt2" stands for gpt2-zero and gpt2-offload
#   NVME_PATH         folder on an NVMe disk
#   NUM_GPUS          GPUs to use                  (all)
#   BUDGET_SECONDS    of this chunk                (540)
#   ARCHIVE           file                         (OUT_DIR.tar.gz)
#   GPU_CHECK_MODELS  presets                      (gpt2 facebook/opt-1.3b meta-llama/Llama-2-7b-hf)
#   GPU_CHECK_ACCELERATOR=cpu  exercises the plumbing without a GPU, in small sizes; the output is labelled CPU
set -uo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
ACCELERATOR=${GPU_CHECK_ACCELERATOR:-cuda}
read -r -a MODELS <<<"${GPU_CHECK_MODELS:-gpt2 facebook/opt-1.3b meta-llama/Llama-2-7b-hf}"
FIRST=${MODELS[0]}
BUDGET_SECONDS=${BUDGET_SECONDS:-540}
LOG_BYTES=200000
FAILED=0
RUNNING=
STEP=
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1

find_python() {
    if [[ -n ${PYTHON:-} ]]; then
        return
    elif [[ -x $ROOT/.venv/bin/python ]]; then
        PYTHON=$ROOT/.venv/bin/python
    else
        PYTHON=python3
    fi
}

# Into one folder for all chunks: ops are built again where DeepSpeed is in another folder, or was installed since.
install_wheels() {
    [[ -n ${WHEELS:-} ]] || return 0
    local key site
    key=$({ cat "$WHEELS"/*.whl && "$PYTHON" -c 'import sys; print(sys.version, sys.prefix)'; } | sha256sum | cut -c1-16)
    site=${XDG_CACHE_HOME:-${HOME:-$WORK}/.cache}/ds_bench/gpu_check/$key
    if [[ ! -d $site ]]; then
        "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$site.$$" "$WHEELS"/*.whl || exit 2
        mv -T "$site.$$" "$site" 2>/dev/null || rm -rf "$site.$$" # another chunk was first
    fi
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
}

# Everything that a run would be refused for, before the first chunk begins.
require_packages() {
    PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} "$PYTHON" - <<'PY' || exit 2
import sys
try:
    from ds_bench.doctor.software import check_packages
    findings = list(check_packages())
except ModuleNotFoundError as error:
    sys.exit(f"gpu_check: {sys.executable} lacks {error.name}: name wheels with WHEELS (scripts/make_wheels.sh)")
found = [finding for finding in findings if finding.level != "ok"]
for finding in found:
    print(f"gpu_check: {finding.level}: {finding.name}: {finding.text}", file=sys.stderr)
if any(finding.level == "problem" for finding in found):
    sys.exit(f"gpu_check: {sys.executable} cannot run this: name wheels with WHEELS (scripts/make_wheels.sh), or a folder with PYTHONPATH")
PY
}

# "meta-llama/Llama-2-7b-hf" to "llama2-7b"
short_of() { basename "$1" | tr '[:upper:]' '[:lower:]' | sed -E 's/-hf$//; s/^llama-([0-9])/llama\1/'; }

# The name of the first visible GPU; nothing without a GPU, or without torch for it.
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
    echo probe probe-stages references-bf16 references-fp32 fidelity prediction launch-warm launch-cold tests
    echo "${!AXES[@]}"
    for model in "${MODELS[@]}"; do
        echo "$(short_of "$model")-zero" "$(short_of "$model")-offload"
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

# Of the budget, less what gathering and the report take.
seconds_left() { echo $((BUDGET_SECONDS - SECONDS - 15)); }

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
    if ((left < 20)); then
        say "$name: not started, the budget is spent"
        record "$name" "" "" "" ""
        return 0
    fi
    ((limit > left)) && limit=$left
    started=$(date -u +%Y-%m-%dT%H:%M:%SZ)
    begin=$SECONDS
    STEP=$name
    echo "== $name (at most $limit s)"
    mkdir -p "$WORK/$name"
    # In the background, so that a signal to this script is acted on at once; timeout ends the command's own group.
    timeout -k 10 "$limit" "$@" > >(tee "$WORK/$name/log") 2>&1 &
    RUNNING=$!
    wait "$RUNNING"
    code=$?
    RUNNING=
    sleep 0.3 # tee writes the last lines
    record "$name" "$started" $((SECONDS - begin)) "$code" "$limit"
    gather "$name"
    STEP=
    say "$name: exit code $code after $((SECONDS - begin)) s$(meaning "$name" "$code")"
    ((code == 0)) || FAILED=1
    archive
}

# OUT_DIR as one file, whole or not at all.
archive() {
    tar -C "$(dirname "$OUT")" -czf "$ARCHIVE.tmp" "$(basename "$OUT")" && mv "$ARCHIVE.tmp" "$ARCHIVE"
}

# However this script ends, what has been measured is in the archive.
finish() {
    if [[ -n $RUNNING ]]; then
        kill -TERM "$RUNNING" 2>/dev/null
        for _ in {1..80}; do
            kill -0 "$RUNNING" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL -- "-$RUNNING" 2>/dev/null # timeout leads a group of its own
    fi
    if [[ -n $STEP ]]; then
        gather "$STEP"
        say "$STEP: cut short"
    fi
    archive
    rm -rf "$WORK"
}

# The files of a step worth keeping, under the step's name.
gather() {
    local name=$1 file run
    [[ -e $WORK/$name/log ]] || return 0
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
    LIMIT=520
    case $1 in
        *_cpu) SIZES=(--batch-size 2 --seq-length 64 --num-steps 5 --warmup-steps 2) ;;
        llama2-7b_*) SIZES=(--batch-size 1 --seq-length 512 --num-steps 10 --warmup-steps 3) ;;
        opt-1.3b_*) SIZES=(--batch-size 8 --seq-length 512 --num-steps 20 --warmup-steps 5) ;;
        *) SIZES=(--batch-size 4 --seq-length 512 --num-steps 50 --warmup-steps 10) ;;
    esac
}

# compare NAME SCRIPT MODEL FLAG...: one comparison as a step.
compare() {
    local name=$1 script=$2 model=$3
    shift 3
    sizes_of "$(short_of "$model")_$ACCELERATOR"
    step "$name" "$LIMIT" "$PYTHON" "$ROOT/$script" --model "$model" "${SIZES[@]}" "${DEVICES[@]}" \
        --output-dir "$WORK/$name" "$@"
}

zero() {
    local stages=(0 1 2 3)
    # Of 7 B parameters on one card of 140 GB stage 0 is predicted to take 151 GB, 1 and 2 alike 139 GB: 3 comes first.
    [[ $(short_of "$1") == llama2-7b ]] && stages=(3 2)
    compare "$(short_of "$1")-zero" zero_stage_comparison.py "$1" --stages "${stages[@]}"
}

host_gb() { awk '/^MemTotal/ {print int($2 / 1048576)}' /proc/meminfo; }

offload() {
    if [[ $(short_of "$1") == llama2-7b ]] && (($(host_gb) < 160)) && [[ " ${STEPS:-} " != *" llama2-7b-offload "* ]]; then
        wanted llama2-7b-offload && say "llama2-7b-offload: left out, predicted to need 137 GB of host memory"
        return 0
    fi
    local strategies=(none cpu_optimizer cpu_full) nvme=()
    if [[ -n ${NVME_PATH:-} ]]; then
        strategies+=(nvme)
        nvme=(--nvme-path "$NVME_PATH")
    fi
    compare "$(short_of "$1")-offload" offload_comparison.py "$1" --strategies "${strategies[@]}" "${nvme[@]}"
}

fidelity() {
    local rounds=5
    [[ $ACCELERATOR == cpu ]] && rounds=1
    sizes_of "$(short_of "$FIRST")_$ACCELERATOR"
    step fidelity 520 "$PYTHON" "$ROOT/bench/fidelity.py" --model "$FIRST" "${SIZES[@]}" "${DEVICES[@]}" \
        --rounds "$rounds" --launcher both --output "$WORK/fidelity/figures.json"
}

prediction() {
    sizes_of "$(short_of "$FIRST")_$ACCELERATOR"
    step prediction 300 "$PYTHON" "$ROOT/bench/prediction.py" --model "$FIRST" "${SIZES[@]}" "${DEVICES[@]}" \
        --output "$WORK/prediction/figures.json"
}

references() {
    local precision
    for precision in bf16 fp32; do
        compare "references-$precision" zero_stage_comparison.py "$FIRST" --stages 0 3 --strategies ddp fsdp2 \
            --precision "$precision"
    done
}

# Step → script, rows and values of axes that the CPU accelerator cannot show, or shows otherwise (docs/axes.md).
declare -A AXES=(
    [axes-attention]="zero_stage_comparison.py --stages 2 --axis attention=eager,sdpa,flash_attention_2"
    [axes-loss]="zero_stage_comparison.py --stages 2 --axis loss=model,chunked,tiled,liger"
    [axes-compile]="zero_stage_comparison.py --stages 1 3 --axis compile=none,torch,deepcompile"
    [axes-data]="zero_stage_comparison.py --stages 2 --axis data_workers=2 --axis data_pin_memory=false,true"
    [axes-allocator]="zero_stage_comparison.py --stages 3 --axis allocator=default,expandable_segments"
    [axes-cores]="offload_comparison.py --strategies cpu_optimizer --axis cpu_binding=none,cores"
    [axes-pin-memory]="offload_comparison.py --strategies cpu_optimizer --axis pin_memory=true,false"
    [axes-pin-backend]="offload_comparison.py --strategies cpu_optimizer --axis pin_memory_backend=torch,native"
    [axes-ratio]="offload_comparison.py --strategies cpu_optimizer --axis offload_ratio=0.5,1"
    [axes-superoffload]="offload_comparison.py --strategies cpu_optimizer --axis superoffload=false,true"
    [axes-zenflow]="offload_comparison.py --stage 2 --strategies cpu_optimizer --grad-accum 2 --axis zenflow=off,on,overlap"
    [axes-qwz]="zero_stage_comparison.py --stages 3 --axis qwz=false,true"
    [axes-states]="zero_stage_comparison.py --stages 2 3 --axis bf16_states=off,all"
    [axes-buffers]="zero_stage_comparison.py --stages 2 3 --axis buffers=default,trainer_auto,small_buffers"
    [axes-overlap]="zero_stage_comparison.py --stages 2 3 --axis overlap_comm=true,false"
    [axes-optimizer]="zero_stage_comparison.py --stages 2 --axis optimizer=adamw,torch_adamw,torch_fused_adamw,lion,muon"
)

axes() {
    local name words
    while read -r name; do
        read -r -a words <<<"${AXES[$name]}"
        sizes_of "$(short_of "$FIRST")_$ACCELERATOR"
        step "$name" 400 "$PYTHON" "$ROOT/${words[0]}" --model "$FIRST" "${SIZES[@]}" --num-steps 10 "${DEVICES[@]}" \
            --output-dir "$WORK/$name" "${words[@]:1}"
    done < <(printf '%s\n' "${!AXES[@]}" | sort)
}

launches() {
    compare launch-warm zero_stage_comparison.py "$FIRST" --launcher warm
    compare launch-cold zero_stage_comparison.py "$FIRST" --launcher deepspeed
}

probe() {
    step probe 400 "$PYTHON" "$ROOT/scripts/gpu_probe.py" --accelerator "$ACCELERATOR" \
        --output "$WORK/probe/figures.json"
    SIZES=(--batch-size 2 --seq-length 32 --num-steps 10 --warmup-steps 2)
    step probe-stages 240 "$PYTHON" "$ROOT/zero_stage_comparison.py" --model tiny "${SIZES[@]}" "${DEVICES[@]}" \
        --output-dir "$WORK/probe-stages"
}

# What the files in OUT_DIR say, all chunks together.
report() {
    "$PYTHON" - "$OUT" <<'PY'
import json, sys
from pathlib import Path
out = Path(sys.argv[1])

def load(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None

def number(value, form):
    return "-" if value is None else format(value, form)

tables = {}
for path in sorted(out.glob("*.json")):
    rows = load(path)
    if isinstance(rows, list) and rows and "strategy" in rows[0]:
        tables[path.stem] = rows
steps = load(out / "steps.json") or []
probe = load(out / "probe.json")
if probe:
    fork = probe.get("fork") or {}
    print("\nprobe")
    print("  ranks may be forked: " + ("not asked" if not fork else "yes" if fork["refused"] is None else f"no, {fork['refused']}"))
    for name, state in probe.items():
        if name.endswith("Builder"):
            print(f"  {name:<20} {'built' if state['ready'] else 'not built'} in {state['seconds']:.0f} s {state['reason']}")
if tables:
    print("\nstep                 strategy        status       ms/step   peak GB  predicted/measured  caveats")
for name, rows in tables.items():
    for row in rows:
        print(f"{name:<20} {row['strategy']:<15} {row['status']:<12} {number(row.get('avg_step_time_ms'), '8.2f'):>8}  "
              f"{number(row.get('gpu_peak_gb'), '8.2f'):>8}  {number(row.get('predicted_over_measured') or row.get('predicted_over_ledger'), '.3f'):>18}  "
              f"{(row.get('caveats') or '')[:80]}")
beside = {}  # GB in use outside torch's allocator, by number of GPUs
for rows in tables.values():
    for row in rows:
        if row.get("gpu_outside_allocator_gb") is not None:
            beside.setdefault(row["num_gpus"], []).append(row["gpu_outside_allocator_gb"])
if beside:
    from ds_bench.prediction.predicted_memory import CONTEXT_BYTES, NCCL_BYTES
    print("\nGPU memory in use outside torch's allocator (used - reserved), per world size")
context = max(beside.get(1, [])) if 1 in beside else None
for count, sizes in sorted(beside.items()):
    assumed = (CONTEXT_BYTES + (NCCL_BYTES if count > 1 else 0)) / 2**30
    constant = "CONTEXT_BYTES" if count == 1 else "NCCL_BYTES"
    value = max(sizes) - (0 if count == 1 else CONTEXT_BYTES / 2**30 if context is None else context)
    print(f"  {count} GPUs: {min(sizes):.2f} to {max(sizes):.2f} GB measured, {assumed:.2f} assumed; "
          f"set {constant} (ds_bench/prediction/predicted_memory.py) to from_gb({max(0, value):.2f})")
pairs = (load(out / "prediction.json") or {}).get("pairs", [])
far = [pair for pair in pairs if pair.get("measured_bytes") and not 0.9 < pair["predicted_bytes"] / pair["measured_bytes"] < 1.1]
if pairs:
    print(f"\nprediction: {len(pairs)} cells, {len(far)} off by more than 10 %")
    for pair in far:
        sizes = pair["predicted_bytes"] / 2**30, pair["measured_bytes"] / 2**30
        print(f"  {pair['strategy']:<34} {pair['what']:<26} predicted {sizes[0]:8.3f} GB, measured {sizes[1]:8.3f} GB")
warm, cold = ({row["strategy"]: row for row in tables.get(name, []) if row["success"]} for name in ("launch-warm", "launch-cold"))
if warm and cold:
    print("\nlaunch               warm ms    cold ms  warm/cold   start warm s   start cold s")
for name in [name for name in warm if name in cold]:
    a, b = warm[name], cold[name]
    times = a["avg_step_time_ms"], b["avg_step_time_ms"]
    print(f"{name:<18} {times[0]:9.2f}  {times[1]:9.2f}  {times[0] / times[1]:9.3f}   "
          f"{number(a.get('start_seconds'), '12.1f'):>12}   {number(b.get('start_seconds'), '12.1f'):>12}")
ratios = (load(out / "fidelity.json") or {}).get("ratio_to_bare") or {}
for name, ratio in ratios.items():
    print(f"\nfidelity: product ({name}) / bare loop {ratio['median']:.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})")
print("\nto report")
bad = [f"step {step['name']} ended with {step['exit_code']}" for step in steps if step.get("exit_code")]
bad += [f"step {step['name']} was not started" for step in steps if step.get("skipped")]
bad += [f"{name}: {row['strategy']} {row['status']} {row.get('error') or ''}"[:200] for name, rows in tables.items() for row in rows if not row["success"]]
bad += [f"prediction off: {pair['strategy']}, {pair['what']}" for pair in far]
bad += [f"ranks cannot be forked: {probe['fork']['refused']}"] if probe and (probe.get("fork") or {}).get("refused") else []
print("\n".join(f"  {line}" for line in bad) or "  nothing failed, nothing is off by more than 10 %")
PY
}

# -v names each test in the log, as pytest writes junit.xml only at its end. What is replaced of pyproject.toml's settings
# needs plugins, or makes every warning an error, also that of another version of a package.
tests() {
    step tests 520 "$PYTHON" -m pytest "$ROOT/tests/integration/test_gpu.py" -m gpu -v -p no:cacheprovider \
        -o addopts=--import-mode=importlib -o filterwarnings=default --junit-xml "$WORK/tests/junit.xml"
}

run_steps() {
    local model
    probe
    zero "$FIRST"
    offload "$FIRST"
    references
    tests
    prediction
    fidelity
    launches
    axes
    for model in "${MODELS[@]:1}"; do
        zero "$model"
        offload "$model"
    done
}

conclude() {
    local kept
    kept="results/reference/${DEVICE}_$(date -u +%Y%m%d)"
    report | tee "$OUT/report.txt"
    say ""
    if [[ $ACCELERATOR == cpu ]]; then
        say "CPU run of the plumbing: these figures say nothing about GPUs; nothing here is to be committed."
    else
        say "archive: $ARCHIVE"
        say "To keep: mkdir -p $kept && cp $OUT/* $kept/ && git add $kept    ($(du -sh "$OUT" | cut -f1))"
    fi
    scrub "$OUT/summary.txt" "$OUT/report.txt"
}

find_python
check_steps
require_device
OUT=${1:-$ROOT/results/gpu_check_${DEVICE}_$(date -u +%Y%m%d)}
mkdir -p "$OUT" || exit 2
OUT=$(cd "$OUT" && pwd)
ARCHIVE=$(realpath -m "${ARCHIVE:-$OUT.tar.gz}")
WORK=$(mktemp -d) || exit 2
trap finish EXIT
trap 'exit 143' TERM HUP
trap 'exit 130' INT
install_wheels
require_packages
cd "$ROOT" || exit 2
DEVICES=(--accelerator "$ACCELERATOR")
[[ -n ${NUM_GPUS:-} ]] && DEVICES+=(--num-gpus "$NUM_GPUS")

say "gpu_check on ${DEVICE^^}, $(date -u +%Y-%m-%dT%H:%M:%SZ), models: ${MODELS[*]}"
[[ $ACCELERATOR == cpu ]] && say "CPU: these figures say nothing about GPUs"
save_nvidia_smi
run_steps
conclude
exit "$FAILED"
