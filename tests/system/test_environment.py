"""What is stored about a host, what is never stored, and what makes two hosts incomparable."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ds_bench.records import json_files
from ds_bench.system.environment import (
    PACKAGES,
    Environment,
    comparability_differences,
    cpu_model,
    hardware_differences,
    read_environment,
    recorded_variables,
    setting_differences,
    software_differences,
    torch_built_for,
)
from ds_bench.system.gpu_state import GpuFacts, GpuInventory
from ds_bench.system.redaction import REDACTED

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

# ------------------------------------------------------------------ variables

SECRET_NAMES = ("HF_TOKEN", "HF_API_KEY", "DS_SECRET", "TORCH_PASSWORD", "NCCL_Credential", "DS_PASS")
PREFIXES = ("hf_", "sk-proj-", "ghp_", "github_pat_", "glpat-", "xoxb-", "AKIA", "AIza", "eyJhbGciOi.")
AROUND = ("{}", "a=1,b={}", "first {} last", "x:{}", '"{}"', "Bearer {}", "--header={};v=2")
OTHER_SECRETS = (
    "https://me:pass@proxy.example:8080/path", "me:pass@proxy.example", "https://ghp0token@github.com/x",
    "https://store.example/blob?sv=2024&sig=abc", "password=short", "{'api_key': 'x1'}", "user=me;PWD=hunter2",
    "-----BEGIN PRIVATE KEY-----\nMIIE",
)  # fmt: skip


def test_credentials_are_not_stored_and_settings_stay_readable() -> None:
    assert recorded_variables(dict.fromkeys(SECRET_NAMES, "x")) == dict.fromkeys(sorted(SECRET_NAMES), REDACTED)
    tokens = [around.format(f"{prefix}Ab-_.09") for prefix in PREFIXES for around in AROUND]
    stored = {text: recorded_variables({"DS_NOTE": text})["DS_NOTE"] for text in (*tokens, *OTHER_SECRETS)}
    assert stored == dict.fromkeys(stored, REDACTED)
    settings = {
        "CUDA_VISIBLE_DEVICES": f"{H200.uuid},GPU-11111111-d72c-4106-c12f-20bd9faed9f6",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,garbage_collection_threshold:0.8",
        "TORCH_CUDA_ARCH_LIST": "8.0;9.0a+PTX",
        "TORCH_EXTENSIONS_DIR": "/home/User7/.cache/torch_extensions/py311_cu130",
        "HF_HOME": "/data/hf_cache/Shared-Models-2026/Llama-3.1-8B-Instruct",
        "HF_ENDPOINT": "https://hub.example.com",
        "NCCL_IB_HCA": "=mlx5_0:1,mlx5_bond_1:1",
        "HF_TOKEN": "",
    }
    assert recorded_variables(settings) == settings
    environ = {"AWS_SECRET_ACCESS_KEY": "x", "SLURM_JWT": "x", "HOME": "/root", "DS_NOTE": "a\udcffb"}
    assert recorded_variables(environ) == {"DS_NOTE": "a\\udcffb"}, "only what affects training, as UTF-8"


# ------------------------------------------------------------------ reading


def test_this_machine_is_read_and_survives_json() -> None:
    environment = read_environment()
    assert environment.host_memory_bytes
    assert environment.cpu_model
    assert {"torch", "deepspeed", "transformers"} <= set(environment.packages) <= set(PACKAGES)
    for each in (environment, HOST):
        assert json_files.build(Environment, each.to_dict()) == each


def test_visible_gpus_are_kept_in_their_order_and_unreadable_facts_are_none(tmp_path: Path) -> None:
    gpus = tuple(replace(H200, index=index, uuid=f"GPU-{index}") for index in range(4))
    inventory = GpuInventory(driver_version="580", gpus=gpus)
    environment = read_environment({"CUDA_VISIBLE_DEVICES": "2,0"}, inventory, root=tmp_path)
    assert ([gpu.index for gpu in environment.gpus], environment.gpu_driver_version) == ([2, 0], "580")
    gaps = ("cpu_model", "physical_cores", "numa_nodes", "host_memory_bytes", "cgroup_memory_limit_bytes")
    assert [name for name in gaps if getattr(environment, name) is not None] == []


def test_what_torch_was_built_for_is_read_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise RuntimeError('torch was imported')\n")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for line, expected in (
        ("cuda: Optional[str] = '13.0'", "13.0"), ('cuda: str | None = "12.6"', "12.6"),
        ("cuda: Optional[str] = None", None), ("# cuda = '12.8'", None), ("cuda_arch = '9.0'", None),
    ):  # fmt: skip
        (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip: Optional[str] = '6.4'\n")
        assert (torch_built_for("cuda"), torch_built_for("hip")) == (expected, "6.4"), line
    monkeypatch.setattr(sys, "path", [])
    assert (torch_built_for("cuda"), read_environment({}, GpuInventory()).packages) == (None, {})


def test_processor_has_the_kernels_name(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    for text, name in (
        ("processor\t: 0\nmodel name\t: Intel(R) Xeon(R): Gold\nflags\t: fpu\n", "Intel(R) Xeon(R): Gold"),
        ("processor : 0\nCPU implementer : 0x41\nCPU part : 0xd4f\n", "ARM implementer 0x41 part 0xd4f"),
    ):
        (tmp_path / "proc/cpuinfo").write_text(text)
        assert cpu_model(tmp_path) == name


# ------------------------------------------------------------------ comparing

DIFFERENCES: tuple[tuple[dict[str, Any], str], ...] = (
    ({"packages": {**HOST.packages, "torch": "2.11.0"}}, "torch 2.13.0 vs 2.11.0"),
    ({"packages": {"torch": "2.13.0", "deepspeed": "0.19.8"}}, "transformers 5.23.0 vs none"),
    ({"torch_cuda_version": None}, "CUDA 13.0 vs none"),
    ({"gpu_driver_version": "550.1"}, "GPU driver 580.65.06 vs 550.1"),
    ({"cpu_model": "Intel Xeon"}, "CPU AMD EPYC 9654 vs Intel Xeon"),
    ({"logical_cores": 8}, "logical cores 16 vs 8"),
    ({"physical_cores": 4}, "physical cores 8 vs 4"),
    ({"cpu_quota_cores": 2.5}, "CPU quota none vs 2.5"),
    ({"gpus": ()}, "GPUs 2 x NVIDIA H200 (140 GB) vs none"),
    ({"gpus": (replace(H200, mig=True), H200)},
     "GPUs 2 x NVIDIA H200 (140 GB) vs 1 x NVIDIA H200 (140 GB), 1 x NVIDIA H200 (140 GB, MIG)"),
)  # fmt: skip


def test_each_difference_that_forbids_comparing_is_one_clause() -> None:
    for change, clause in DIFFERENCES:
        assert comparability_differences(HOST, replace(HOST, **change)) == [clause]


def test_facts_without_influence_on_speed_do_not_forbid_comparing() -> None:
    cooler = replace(H200, index=5, uuid="GPU-9", temperature_celsius=30, memory_used_bytes=7, other_processes=None)
    other = replace(
        HOST,
        hostname="node-8",
        packages={**HOST.packages, "numpy": "2.3.0"},
        gpus=(cooler, replace(cooler, index=6)),
        variables={"OMP_NUM_THREADS": "4"},
    )
    assert comparability_differences(HOST, other) == []
    assert software_differences(HOST, replace(other, logical_cores=8)) == []
    assert setting_differences(HOST, other) == [
        "host node-7 vs node-8",
        "numpy 2.4.6 vs 2.3.0",
        "OMP_NUM_THREADS 8 vs 4",
    ]


def test_jobs_on_several_hosts_compare_by_the_kinds_of_their_hosts_and_not_by_their_order() -> None:
    def job(*models: str) -> Environment:
        return replace(HOST, hosts=tuple(Environment(hostname=m, cpu_model=m, logical_cores=8) for m in models))

    assert hardware_differences(job("X", "Y"), job("Y", "X")) == []
    x, y = ("(CPU X, logical cores 8)", "(CPU Y, logical cores 8)")
    assert hardware_differences(job("X", "Y"), job("X", "X")) == [f"hosts 1 x {x}; 1 x {y} vs 2 x {x}"]
