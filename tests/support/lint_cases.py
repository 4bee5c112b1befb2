"""For every rule of ``check``, a configuration that breaks it."""

from __future__ import annotations

from typing import Any

CLEAN: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0}


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


def optimizer(name: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": params}}


CPU = {"device": "cpu", "pin_memory": True}
NVME = {"device": "nvme", "nvme_path": "/nvme", "pin_memory": True}
ZENFLOW = {"select_strategy": "step", "select_interval": 4, "update_interval": 2}
MASTER_WEIGHTS = {"enabled": True, "bf16_master_weights_and_grads": True, "check_grad_overflow": True}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": {}}}

RANKS = {"hpz-partition-size": 3}
"""Rules that need the number of ranks → a number that breaks them."""

CASES: list[tuple[str, dict[str, Any]]] = [
    # keys
    ("ignored-key", {"zero_optimisation": {"stage": 3}}),
    ("comment-key", {"_comment": "for eight GPUs"}),
    ("unknown-key", {"bf16": {"enable": True}}),
    ("unknown-key", {"flops_profiler": {"enabeld": True}}),
    ("removed-key", {"nebula": {}}),
    ("removed-key", zero(3, mics_shard_size=8)),
    ("old-name", zero(2, cpu_offload_use_pin_memory=True)),
    ("old-name", {**zero(2, cpu_offload=True, offload_optimizer=CPU)}),
    ("named-twice", zero(3, prefetch_bucket_size=1, stage3_prefetch_bucket_size=1)),
    ("type", zero(3, reduce_bucket_size=1.5)),
    ("type", {"fp16": True}),
    ("text-as-switch", {"memory_breakdown": "false"}),
    ("text-as-number", {"gradient_clipping": "1.0"}),
    # batch sizes
    ("batch-size", {"train_micro_batch_size_per_gpu": None}),
    ("batch-size", {"train_micro_batch_size_per_gpu": 0}),
    ("batch-size", {"train_batch_size": 30, "train_micro_batch_size_per_gpu": 4}),
    ("batch-for-one-number-of-ranks", {"train_batch_size": 16, "gradient_accumulation_steps": 2}),
    # optimizer and scheduler
    ("removed-optimizer", optimizer("OneBitAdam")),
    ("unknown-optimizer", optimizer("AdmW")),
    ("untested-optimizer", {**zero(1), **optimizer("SGD")}),
    ("unknown-argument", optimizer("AdamW", learning_rate=1e-4)),
    ("missing-argument", {"scheduler": {"type": "WarmupDecayLR", "params": {}}}),
    ("unknown-scheduler", {"scheduler": {"type": "WarmUpLR", "params": {}}}),
    ("warmup-steps", {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}),
    ("text-argument", optimizer("SGD", lr="0.1")),
    ("text-argument", {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "1e-4"}}}),
    # automatic values
    ("automatic-value", {"gradient_clipping": "auto"}),
    ("unfilled-automatic-value", {"steps_per_print": "auto"}),
    # what nothing reads
    ("unread-key", zero(2, sub_group_size=10)),
    ("dead-key", {**zero(1), "disable_allgather": True}),
    ("dead-key", zero(2, allgather_partitions=True)),
    # rules that rows have too
    ("stage-0-offload", zero(0, offload_optimizer=CPU)),
    ("stage-0-offload-of-another-optimizer", {**zero(0, offload_optimizer=CPU), **optimizer("SGD")}),
    ("offload-param-below-stage-3", zero(2, offload_param=CPU)),
    ("hpz-partition-size", zero(3, zero_hpz_partition_size=2)),
    ("nvme-below-stage-3", zero(1, offload_optimizer=NVME)),
    ("nvme-without-folder", zero(3, offload_optimizer={"device": "nvme", "pin_memory": True})),
    (
        "no-cpu-optimizer",
        {**zero(2, offload_optimizer=CPU), **optimizer("Lamb"), "zero_allow_untested_optimizer": True},
    ),
    ("two-precisions", {"bf16": {"enabled": True, "check_grad_overflow": True}, "fp16": {"enabled": True}}),
    ("deepcompile", {**zero(1), "compile": {"deepcompile": True}}),
    ("deepcompile-at-stage-0", {"compile": {"deepcompile": True}}),
    ("autotp", {"tensor_parallel": {"autotp_size": 2}}),
    ("ulysses", {"sequence_parallel_size": 2}),
    ("pipeline", {"pipeline": {}}),
    (
        "ratio-with-one-sub-group",
        zero(3, offload_optimizer={**CPU, "ratio": 0.5}),
    ),
    ("super-offload-below-stage-3", zero(2, offload_optimizer={**CPU, "super_offload": True})),
    ("quantized-gradients-on-one-node", zero(3, zero_quantized_gradients=True)),
    ("activation-checkpointing-block", {"activation_checkpointing": {"cpu_checkpointing": True}}),
    ("comms-logger-switched-off", {"comms_logger": {"enabled": False}}),
    ("comms-logger", {"comms_logger": {"enabled": True}}),
    ("wall-clock-breakdown", {"wall_clock_breakdown": True}),
    ("flops-profiler", {"flops_profiler": {"enabled": True}}),
    ("throughput-timer", {"timers": {"throughput": {"enabled": True}}}),
    ("renamed-thread-count", {"aio": {"thread_count": 4}}),
    # rules of files
    ("fp16-master-weights-and-grads-at-stage-0", {"fp16": {"fp16_master_weights_and_grads": True}}),
    ("bf16-master-weights-and-grads-at-stage-0", {"bf16": {"bf16_master_weights_and_grads": True}}),
    (
        "bf16-optimizer-states-at-stage-0",
        {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
    ),
    ("bf16-states-without-master-weights", {**zero(1), "bf16": {"bf16_optimizer_states": True}}),
    ("summed-gradients", {**zero(3), "gradient_allreduce_op": "sum"}),
    ("unknown-allreduce-op", {"gradient_allreduce_op": "max"}),
    ("unknown-communication-data-type", {"communication_data_type": "int8"}),
    ("unknown-seq-parallel-communication-data-type", {"seq_parallel_communication_data_type": "int8"}),
    ("unknown-autocast-dtype", {"torch_autocast": {"dtype": "int4"}}),
    ("unknown-tag-validation", {"checkpoint": {"tag_validation": "no"}}),
    ("unknown-checkpoint-writer", {"checkpoint": {"writer": {"type": "slow"}}}),
    ("unknown-writer-parallelism", {"checkpoint": {"writer": {"data_parallel": "all"}}}),
    ("no-sequence-parallel-ranks", {"sequence_parallel_size": 0}),
    ("patterns-not-text", {"data_types": {"keep_in_fp32_modules": [1]}}),
    ("ratio-below-stage-3", zero(2, offload_optimizer={**CPU, "ratio": 0.5})),
    ("no-gradient-norm-at-this-stage", zero(3, compute_grad_norm=False)),
    ("no-gradient-norm-to-clip", zero(1, compute_grad_norm=False)),
    ("unknown-select-strategy", zero(2, offload_optimizer=CPU, zenflow={**ZENFLOW, "select_strategy": "all"})),
    ("zenflow-select-interval", zero(2, offload_optimizer=CPU, zenflow={**ZENFLOW, "select_interval": "all"})),
    ("zenflow-update-interval", zero(2, offload_optimizer=CPU, zenflow={**ZENFLOW, "update_interval": 0})),
    ("zenflow-intervals", zero(2, offload_optimizer=CPU, zenflow={**ZENFLOW, "select_interval": 1})),
    (
        "zenflow-replaces-accumulation",
        {**zero(2, offload_optimizer=CPU, zenflow=ZENFLOW), "gradient_accumulation_steps": 3},
    ),
    ("zenflow-without-interval", zero(2, offload_optimizer=CPU, zenflow={})),
    ("fp16-loss-scale-window", {"fp16": {"enabled": True, "loss_scale_window": 0}}),
    ("fp16-min-loss-scale", {"fp16": {"enabled": True, "min_loss_scale": 0}}),
    ("fp16-loss-scale", {"fp16": {"enabled": True, "loss_scale": -1}}),
    ("scaling-before-reduce-scatter", {**zero(2), "prescale_gradients": True}),
    ("accumulation-format-at-stage-0", {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
    ("master-weights-without-offload", {**zero(2), "bf16": MASTER_WEIGHTS}),
    ("legacy-stage-1", zero(1, legacy_stage1=True)),
    ("unmanaged-accumulation", {**zero(1, overlap_comm=True), "managed_gradient_accumulation": False}),
    ("lamb-with-static-loss-scale", {**optimizer("Lamb"), "fp16": {"loss_scale": 128}}),
    ("muon-with-reduce-scatter", {**zero(3), **optimizer("Muon"), "gradient_accumulation_steps": 1}),
    ("max-grad-norm", optimizer("AdamW", max_grad_norm=1.0)),
    ("aio-text", {"aio": {"block_size": "1048576"}}),
    ("old-form-of-zero", {"zero_optimization": True}),
    ("old-name-of-bf16", {"bfloat16": {"enabled": True, "check_grad_overflow": True}}),
    ("elastic-checkpoint-at-stage-3", zero(3, elastic_checkpoint=True)),
    ("parameters-kept-in-memory", zero(3, stage3_prefetch_bucket_size=0, offload_param=NVME)),
    ("prefetch-from-nvme", zero(3, offload_param={**NVME, "max_in_cpu": 0})),
    ("open-gradient-clipping", {"gradient_clipping": None}),
    ("open-pin-memory-of-optimizer", zero(2, offload_optimizer={"device": "cpu"})),
    ("open-pin-memory-of-param", zero(3, offload_param={"device": "cpu"})),
    ("open-overflow-check", {**zero(2), "bf16": {"enabled": True}}),
]
"""Name of a rule, and what makes it apply when it is laid over CLEAN; null removes a key."""
