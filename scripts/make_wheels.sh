#!/usr/bin/env bash
# Builds the wheels that a machine with torch and transformers but without network lacks, for the WHEELS folder of
# scripts/gpu_check.sh.
#
#   scripts/make_wheels.sh [FOLDER]         default: wheels
#
# Environment, all optional:
#   PYTHON          an interpreter with torch and pip, which DeepSpeed's setup.py imports  (.venv/bin/python, else python3)
#   TARGET_PYTHON   version of the other machine's interpreter                             (3.12)
#   TARGET_PLATFORM its platform, as pip names it                                          (manylinux_2_17_x86_64)
#   MORE            further packages, without their requirements, e.g. "scipy pandas"
#
# Exit code: 1 if a wheel cannot be built, or if all of them together take more than 64 MiB.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
FOLDER=${1:-wheels}
PYTHON=${PYTHON:-$([[ -x $ROOT/.venv/bin/python ]] && echo "$ROOT/.venv/bin/python" || echo python3)}
TARGET_PYTHON=${TARGET_PYTHON:-3.12}
TARGET_PLATFORM=${TARGET_PLATFORM:-manylinux_2_17_x86_64}
MAX_BYTES=$((64 << 20))

# The requirement of a package, with its version range, from pyproject.toml.
requirement() {
    "$PYTHON" - "$ROOT/pyproject.toml" "$1" <<'PY'
import re, sys, tomllib
from pathlib import Path
project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
lines = [*project["dependencies"], *project["optional-dependencies"]["run"]]
print(next(line for line in lines if re.match(r"[\w-]+", line)[0] == sys.argv[2]))
PY
}

mkdir -p "$FOLDER"
rm -f "$FOLDER"/*.whl
# DeepSpeed is published only as source. Its ops are built on the machine that runs them.
DS_BUILD_OPS=0 "$PYTHON" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$FOLDER" "$(requirement deepspeed)"
# DeepSpeed's requirements that do not come with torch and transformers; pydantic brings its own, in pinned versions.
mapfile -t needed < <("$PYTHON" - "$FOLDER"/deepspeed-*.whl <<'PY'
import re, sys, zipfile
archive = zipfile.ZipFile(sys.argv[1])
metadata = archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))).decode()
names = re.findall(r"^Requires-Dist: ([\w.-]+)[^;\n]*$", metadata, re.M)
print(*(name for name in names if name not in ("torch", "numpy", "packaging", "psutil", "ninja", "tqdm", "pydantic", "hjson")), sep="\n")
PY
)
download() {
    "$PYTHON" -m pip download --quiet --dest "$FOLDER" --only-binary=:all: --python-version "$TARGET_PYTHON" \
        --platform "$TARGET_PLATFORM" --implementation cp "$@"
}
for name in pydantic hjson rich psutil nvidia-ml-py ninja; do needed+=("$(requirement "$name")"); done
download "${needed[@]}" pytest
# shellcheck disable=SC2086
download --no-deps "$(requirement accelerate)" ${MORE:-}
size=$(cat "$FOLDER"/*.whl | wc -c)
ls "$FOLDER"
if ((size > MAX_BYTES)); then
    echo "make_wheels: $FOLDER takes $((size >> 20)) MiB, more than $((MAX_BYTES >> 20))" >&2
    exit 1
fi
echo "make_wheels: $((size >> 10)) KiB in $FOLDER"
