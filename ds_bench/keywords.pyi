"""Types of the keywords of ``ds_bench.run`` and ``ds_bench.plan``. Made by scripts/make_keywords.py."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

PathText = str | os.PathLike[str]

class RunKeywords(TypedDict, total=False):
    model: Mapping[str, Any] | str | Sequence[str]
    model_factory: str | Sequence[str] | None
    trust_remote_code: bool | Sequence[bool]
    seq_length: int | Literal["auto"] | Sequence[int] | None
    batch_size: int | Literal["auto"] | Sequence[int]
    global_batch_size: int | Sequence[int] | None
    grad_accum: int | Sequence[int] | None
    num_steps: int | Sequence[int]
    warmup_steps: int | Sequence[int]
    precision: str | Sequence[str]
    activation_checkpointing: bool | Sequence[bool]
    seed: int | Sequence[int]
    dropout: float | Sequence[float] | None
    lora: str | Sequence[str] | None
    freeze: str | Sequence[str] | None
    pass_type: str | Sequence[str]
    synchronized: bool | Sequence[bool]
    stages: int | Sequence[int]
    strategies: str | Sequence[str]
    stage: int
    configs: PathText | Sequence[PathText]
    keep_batch: bool
    base_config: PathText | None
    common_batch: bool
    relative_to: str | int | None
    data: PathText | Sequence[PathText] | None
    data_dtype: str | Sequence[str] | None
    vocab_size: int | Sequence[int] | None
    data_workers: int | Sequence[int] | None
    data_pin_memory: bool | Sequence[bool]
    data_prefetch: int | Sequence[int]
    optimizer: Mapping[str, Any] | str | Sequence[str] | None
    profile: str | Sequence[str]
    profile_steps: int
    profile_ranks: int | Sequence[int]
    nsys_start: int
    nsys_end: int
    script: str | Sequence[str]
    python: str | None
    override_config: bool
    accelerate_env: bool
    engine: str | None
    num_gpus: int | Sequence[int] | None
    accelerator: str
    launcher: str
    hostfile: PathText | None
    include: str | None
    exclude: str | None
    host_command: str | None
    env: str | Sequence[str]
    master_addr: str | None
    master_port: int | None
    nvme_path: PathText | None
    cpu_memory_limit: float | Sequence[float] | None
    gpu_memory_limit: float | Sequence[float] | None
    peak_tflops: float | None
    timeout: float
    stall_timeout: float
    skip_predicted_oom: bool
    force: bool
    output_dir: PathText
    repeats: int
    goal: str
    export: str | int | None
    monitor: str | bool | None
    checkpoint: bool
    checkpoint_path: PathText | None
    csv: PathText | None
    resume: PathText | None
    shard: str | None
    retry: str | Sequence[str]
    budget: float
    yes: bool
    training: Mapping[str, Any]
    configurations: Mapping[str, Any]
    dataset: Mapping[str, Any]
    dataloader: Mapping[str, Any]
    axes: Mapping[str, Any]
    profiling: Mapping[str, Any]
    launch: Mapping[str, Any]
    output: Mapping[str, Any]
    sweep: Mapping[str, Any]

class PlanKeywords(TypedDict, total=False):
    model: str
    model_factory: str | None
    num_gpus: int
    gpus_per_node: int | None
    gpu: str
    host_memory: float | None
    batch_size: int
    seq_length: int | None
    varying_lengths: bool
    axis: str
    lora: str | None
    freeze: str | None
    image_tokens: int
    image_size: int
    grad_accum: int
    precision: str
    activation_checkpointing: bool
    strategies: str | Sequence[str]
    configs: PathText | Sequence[PathText]
    keep_batch: bool
    min_gpus: bool
    max_batch: bool
    quick: bool
    exact: bool
    export: str | int | None
    online: bool
    trust_remote_code: bool
