"""What is kept of a host, what is never kept, and what forbids comparing two."""

import base64
import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ds_bench.system.environment
from ds_bench.records import json_files
from ds_bench.system.environment import (
    PACKAGES,
    Environment,
    comparability_differences,
    cpu_model,
    hardware_differences,
    package_versions,
    read_environment,
    recorded_variables,
    setting_differences,
    software_differences,
    torch_cuda_version,
)
from ds_bench.system.gpus import GpuFacts, GpuInventory
from ds_bench.system.redaction import REDACTED, looks_secret

H200 = GpuFacts(
    index=0,
    name="NVIDIA H200",
    uuid="GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    compute_capability=(9, 0),
    memory_total_bytes=150_754_820_096,
    throttle_reasons=("gpu_idle",),
    other_processes=((77, None), (78, 2**30)),
)
HOST = Environment(
    hostname="node-7",
    cpu_model="AMD EPYC 9654",
    logical_cores=16,
    physical_cores=8,
    packages={"torch": "2.13.0", "deepspeed": "0.19.8", "transformers": "5.23.0", "numpy": "2.4.6"},
    torch_cuda_version="13.0",
    gpu_driver_version="580.65.06",
    gpus=(H200, replace(H200, index=1, uuid="GPU-2")),
    variables={"OMP_NUM_THREADS": "8"},
)


def stored(environ: dict[str, str]) -> str:
    """Everything that would be written for a process with these variables."""
    return json.dumps(replace(HOST, variables=recorded_variables(environ)).to_dict(), ensure_ascii=False)


# --- secrets


INNOCENT_NAMES = st.sampled_from(
    [
        "NVIDIA_TF32_OVERRIDE",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "DS_NOTE",
        "NCCL_CONF",
        "HF_ENDPOINT",
        "TORCH_EXTRA",
        "CUDA_X",
        "SLURM_JOB_PARTITION",
    ]
)
SECRET_NAMES = st.sampled_from(
    [
        "HF_TOKEN",
        "HF_API_KEY",
        "DS_SECRET",
        "TORCH_PASSWORD",
        "NCCL_Credential",
        "HF_HUB_AUTH",
        "CUDA_KEY_FILE",
        "DS_PASS",
    ]
)
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
# Hashed, so that the text is as random as a key is, however Hypothesis shrinks.
RANDOM_BYTES = st.binary(max_size=8).map(lambda seed: hashlib.sha256(seed).digest())
RANDOM_TEXTS = st.one_of(
    RANDOM_BYTES.map(lambda raw: raw.hex()),
    RANDOM_BYTES.map(lambda raw: raw.hex()[:32]),
    RANDOM_BYTES.map(lambda raw: base64.urlsafe_b64encode(raw).decode()),
    RANDOM_BYTES.map(lambda raw: base64.b64encode(raw).decode()),
    RANDOM_BYTES.map(lambda raw: base64.b64encode(b"\xff\xff" + raw).decode()),
    RANDOM_BYTES.map(
        lambda raw: f"{raw.hex()[:8]}-{raw.hex()[8:12]}-4{raw.hex()[12:15]}-8{raw.hex()[15:18]}-{raw.hex()[18:30]}"
    ),
)
MARKED_TEXTS = st.builds(
    str.__add__,
    st.sampled_from(
        ["hf_", "sk-", "sk-proj-", "ghp_", "gho_", "github_pat_", "glpat-", "xoxb-", "AKIA", "AIza", "eyJhbGciOi."]
    ),
    st.text(alphabet=LETTERS + "-_.", min_size=8, max_size=60),
)
SURROUNDINGS = st.sampled_from(["{}", "a=1,b={}", "first {} last", "x:{}", '"{}"', "Bearer {}", "--header={};v=2"])


@given(SECRET_NAMES, st.text(alphabet=LETTERS + " ./:-_äß\n", min_size=12).map(lambda text: f"Zq{text}"))
def test_whatever_stands_under_the_name_of_a_secret_is_stored_nowhere(name: str, value: str) -> None:
    kept = recorded_variables({name: value})
    assert kept == {name: REDACTED}
    assert json.dumps(value, ensure_ascii=False)[1:-1] not in stored({name: value})


@given(INNOCENT_NAMES, MARKED_TEXTS, SURROUNDINGS)
def test_a_token_with_its_issuers_mark_is_stored_nowhere_under_any_name(name: str, token: str, around: str) -> None:
    assert token not in stored({name: around.format(token)})


@given(INNOCENT_NAMES, RANDOM_TEXTS, SURROUNDINGS)
def test_a_long_random_string_is_stored_nowhere_under_any_name(name: str, token: str, around: str) -> None:
    assert token not in stored({name: around.format(token)})


@given(
    INNOCENT_NAMES,
    st.sampled_from(["https://", "http://", "redis://", ""]),
    st.text(alphabet=LETTERS + "!$%&*@:/ ", min_size=6),
)
def test_the_password_of_an_address_is_stored_nowhere(name: str, scheme: str, password: str) -> None:
    value = f"{scheme}me:{password}@proxy.example:8080/path"
    assert value not in stored({name: value})
    assert recorded_variables({name: value}) == {name: REDACTED}


def test_other_forms_of_credentials_are_hidden(subtests: pytest.Subtests) -> None:
    for value in (
        "https://ghp0token@github.com/x",
        "https://store.example/blob?sv=2024&sig=abc",
        "password=short",
        "{'api_key': 'x1'}",
        "user=me;PWD=hunter2",
        "-----BEGIN PRIVATE KEY-----\nMIIE",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc",
    ):
        with subtests.test(value):
            assert looks_secret("DS_NOTE", value)


def test_settings_that_explain_a_result_stay_readable(subtests: pytest.Subtests) -> None:
    for name, value in (
        ("CUDA_VISIBLE_DEVICES", "0,1,2,3"),
        ("CUDA_VISIBLE_DEVICES", H200.uuid),
        ("CUDA_VISIBLE_DEVICES", f"{H200.uuid},GPU-11111111-d72c-4106-c12f-20bd9faed9f6"),
        ("CUDA_VISIBLE_DEVICES", "MIG-8932f937-d72c-4106-c12f-20bd9faed9f6"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,garbage_collection_threshold:0.8,max_split_size_mb:128"),
        ("TORCH_CUDA_ARCH_LIST", "8.0;9.0a+PTX"),
        ("TORCH_EXTENSIONS_DIR", "/home/User7/.cache/torch_extensions/py311_cu130"),
        ("HF_HOME", "/data/hf_cache/Shared-Models-2026/Llama-3.1-8B-Instruct"),
        ("HF_ENDPOINT", "https://hub.example.com"),
        ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_bond_1:1"),
        ("NCCL_SOCKET_IFNAME", "^docker0,lo"),
        ("NCCL_DEBUG_SUBSYS", "INIT,COLL"),
        ("CUDA_HOME", "/usr/local/cuda-13.0"),
        ("OMP_NUM_THREADS", "8"),
        ("KMP_AFFINITY", "granularity=fine,compact,1,0"),
        ("HF_TOKEN", ""),
    ):
        with subtests.test(name=name, value=value):
            assert recorded_variables({name: value}) == {name: value}


@given(st.dictionaries(st.text(min_size=1), st.text()))
def test_only_variables_that_steer_training_are_kept(environ: dict[str, str]) -> None:
    kept = recorded_variables({**environ, "AWS_SECRET_ACCESS_KEY": "x", "SLURM_JWT": "x", "HOME": "/root"})
    assert not {"AWS_SECRET_ACCESS_KEY", "SLURM_JWT", "HOME"} & set(kept)


def test_bytes_that_are_no_utf8_can_still_be_written_as_utf8() -> None:
    assert json.loads(stored({"DS_NOTE": "a\udcffb"}).encode())["variables"] == {"DS_NOTE": "a\\udcffb"}


def test_a_value_too_long_for_a_setting_is_not_stored() -> None:
    assert recorded_variables({"DS_NOTE": "word " * 20_000}) == {"DS_NOTE": REDACTED}


# --- read_environment


def test_capture_tells_this_machine_and_survives_json() -> None:
    environment = read_environment()
    assert environment.logical_cores >= 1
    assert environment.host_memory_bytes
    assert environment.cpu_model
    assert environment.python_version == ".".join(map(str, sys.version_info[:3]))
    assert {"torch", "deepspeed", "transformers"} <= set(environment.packages) <= set(PACKAGES)
    plain = environment.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert json_files.build(Environment, plain) == environment


def test_capture_keeps_only_the_cards_that_are_visible_in_their_order() -> None:
    gpus = tuple(replace(H200, index=index, uuid=f"GPU-{index}") for index in range(4))
    cards = GpuInventory(driver_version="580.65.06", gpus=gpus)
    environment = read_environment({"CUDA_VISIBLE_DEVICES": "2,0"}, cards)
    assert [gpu.index for gpu in environment.gpus] == [2, 0]
    assert environment.gpu_driver_version == "580.65.06"
    assert environment.variables == {"CUDA_VISIBLE_DEVICES": "2,0"}


def test_a_host_that_shows_none_of_its_files_is_captured_with_gaps_and_no_guesses(tmp_path: Path) -> None:
    environment = read_environment({}, GpuInventory(), root=tmp_path)
    gaps = ("cpu_model", "physical_cores", "numa_nodes", "host_memory_bytes", "shm_bytes", "cgroup_memory_limit_bytes")
    assert [name for name in gaps if getattr(environment, name) is not None] == []


def run_python(program: str) -> Any:
    """A fresh interpreter's answer, as JSON."""
    folder = Path(ds_bench.system.environment.__file__).parents[2]
    return json.loads(subprocess.check_output([sys.executable, "-c", program], cwd=folder, timeout=60))


def test_capture_imports_neither_torch_nor_what_is_built_on_it() -> None:
    heavy = ("torch", "deepspeed", "transformers", "pandas", "numpy", "accelerate")
    program = f"""if 1:
        import json, sys
        from ds_bench.system.environment import read_environment
        packages = read_environment().packages
        print(json.dumps([list(packages), [name for name in {heavy} if name in sys.modules]]))"""
    packages, imported = run_python(program)
    assert "torch" in packages
    assert imported == []


def test_importing_the_modules_loads_nothing_that_only_capture_needs() -> None:
    late = ("pynvml", "psutil", "importlib.metadata", "platform", "subprocess", "torch")
    program = f"""if 1:
        import json, sys
        before = set(sys.modules)
        import ds_bench.system.environment
        print(json.dumps([name for name in {late} if name in set(sys.modules) - before]))"""
    assert run_python(program) == []


def fake_torch(folder: Path, version_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text("raise RuntimeError('torch was imported')\n")
    (folder / "torch" / "version.py").write_text(version_text)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ("cuda = '12.8'", "12.8"),
        ('cuda: str | None = "12.6"', "12.6"),
        ("cuda: Optional[str] = None", None),
        ("# cuda = '12.8'", None),
        ("cuda_arch = '9.0'", None),
    ],
)
def test_torchs_cuda_version_is_read_as_text(
    line: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_torch(tmp_path, f"__version__ = '2.13.0'\n{line}\nhip: Optional[str] = '6.4'\n", monkeypatch)
    assert torch_cuda_version() == expected


def test_without_torch_there_is_no_cuda_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert torch_cuda_version() is None


def test_a_package_that_is_not_installed_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert package_versions() == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nmodel name\t: Intel(R) Xeon(R): Gold\nflags\t: fpu\n", "Intel(R) Xeon(R): Gold"),
        ("processor : 0\nCPU implementer : 0x41\nCPU part : 0xd4f\n", "ARM implementer 0x41 part 0xd4f"),
        ("model name\t:\n", None),
        ("", None),
    ],
)
def test_the_processor_is_named_as_the_kernel_names_it(text: str, expected: str | None, tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(text)
    assert cpu_model(tmp_path) == expected


# --- stored form


def test_a_stored_environment_comes_back_equal_with_tuples_in_place() -> None:
    again = json_files.build(Environment, HOST.to_dict())
    assert again == HOST
    assert again.gpus[0].compute_capability == (9, 0)
    assert again.gpus[0].other_processes == ((77, None), (78, 2**30))


def test_a_stored_environment_that_does_not_fit_is_refused_by_the_name_of_its_field(subtests: pytest.Subtests) -> None:
    for change, names in (
        ({"logical_cores": 0}, "logical_cores"),
        ({"host_memory_bytes": -1}, "host_memory_bytes"),
        ({"colour": "red"}, "colour"),
        ({"gpus": [{"index": -2}]}, "index"),
        ({"gpus": [{"name": "x"}]}, "index"),
    ):
        with subtests.test(change=change, names=names), pytest.raises(ValueError, match=names):
            json_files.build(Environment, {**HOST.to_dict(), **change})


def test_a_stored_environment_without_its_host_is_refused() -> None:
    plain = HOST.to_dict()
    del plain["hostname"]
    with pytest.raises(ValueError, match="hostname"):
        json_files.build(Environment, plain)


# --- comparing


def test_each_difference_that_forbids_comparing_is_one_clause(subtests: pytest.Subtests) -> None:
    for change, clause in (
        ({"packages": {**HOST.packages, "torch": "2.11.0"}}, "torch 2.13.0 against 2.11.0"),
        ({"packages": {**HOST.packages, "deepspeed": "0.19.9"}}, "deepspeed 0.19.8 against 0.19.9"),
        ({"packages": {"torch": "2.13.0", "deepspeed": "0.19.8"}}, "transformers 5.23.0 against none"),
        ({"torch_cuda_version": None}, "CUDA 13.0 against none"),
        ({"gpu_driver_version": "550.1"}, "GPU driver 580.65.06 against 550.1"),
        ({"cpu_model": "Intel Xeon"}, "CPU AMD EPYC 9654 against Intel Xeon"),
        ({"logical_cores": 8}, "logical cores 16 against 8"),
        ({"physical_cores": 4}, "physical cores 8 against 4"),
        ({"cpu_quota_cores": 2.5}, "CPU quota none against 2.5"),
        ({"gpus": (H200,)}, "GPUs 2 x NVIDIA H200 (140 GB) against 1 x NVIDIA H200 (140 GB)"),
        ({"gpus": ()}, "GPUs 2 x NVIDIA H200 (140 GB) against none"),
        (
            {"gpus": (H200, replace(H200, memory_total_bytes=80 * 2**30))},
            "GPUs 2 x NVIDIA H200 (140 GB) against 1 x NVIDIA H200 (140 GB), 1 x NVIDIA H200 (80.00 GB)",
        ),
        (
            {"gpus": (replace(H200, mig=True), H200)},
            "GPUs 2 x NVIDIA H200 (140 GB) against 1 x NVIDIA H200 (140 GB), 1 x NVIDIA H200 (140 GB, MIG)",
        ),
    ):
        with subtests.test(change=change, clause=clause):
            assert comparability_differences(HOST, replace(HOST, **change)) == [clause]


def test_what_does_not_bear_on_speed_does_not_forbid_comparing() -> None:
    cooler = replace(H200, index=5, uuid="GPU-9", temperature_celsius=30, memory_used_bytes=7, other_processes=None)
    other = replace(
        HOST,
        hostname="node-8",
        kernel="6.1",
        packages={**HOST.packages, "numpy": "2.3.0"},
        gpus=(cooler, replace(cooler, index=6)),
        variables={},
    )
    assert comparability_differences(HOST, other) == []


def test_an_environment_compares_with_itself_after_storing() -> None:
    assert comparability_differences(HOST, json_files.build(Environment, HOST.to_dict())) == []


def test_versions_and_hardware_are_told_apart() -> None:
    other = replace(HOST, logical_cores=8, packages={**HOST.packages, "torch": "2.11.0"})
    assert hardware_differences(HOST, other) == ["logical cores 16 against 8"]
    assert software_differences(HOST, other) == ["torch 2.13.0 against 2.11.0"]
    assert setting_differences(HOST, other) == []


def test_what_may_explain_a_change_without_forbidding_a_comparison_is_named() -> None:
    other = replace(
        HOST, hostname="node-8", packages={**HOST.packages, "numpy": "2.3.0"}, variables={"OMP_NUM_THREADS": "4"}
    )
    assert comparability_differences(HOST, other) == []
    assert setting_differences(HOST, other) == [
        "host node-7 against node-8",
        "numpy 2.4.6 against 2.3.0",
        "OMP_NUM_THREADS 8 against 4",
    ]
