"""Axolotl 0.19's command: `axolotl train` with a YAML file of its schemas (`utils/schemas/config.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from calc.launch import hugging_face, shell
from calc.launch.shell import ATTENTION, Launch, LaunchError
from calc.models.lora import module_names
from calc.scenario.scenario import Scenario

FIRST = "0.19"
FILE = "axolotl.yaml"
LIGER = "axolotl.integrations.liger.LigerPlugin"
CUT = "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"
FOUR_BITS = {"full": (), "lora": (), "qlora": ("double_quantization",)}  # which no key of the schema sets
PRECISIONS = ("bf16", "mixed", "fsdp-mixed", "fp32")


def launch(s: Scenario) -> Launch:
    """The command for `s` with its files; raises LaunchError if a setting is missing that the job needs."""
    files = {FILE: hugging_face.yaml(settings(s)), **hugging_face.sharding_files(s)}
    hugging_face.reference(s)
    command = f"axolotl train {FILE}"
    if s.gpus > 1:
        words = " ".join(" ".join(words) for words in shell.torchrun(s))
        command += f" --launcher torchrun -- {words}"
    # axolotl leaves the allocator's variable alone where it is set, and else switches segments on itself
    told = shell.setting(s, "") if s.pinned_max_round_threshold_mb else shell.threads(s)
    return Launch(told + command, files, tuple(notes(s, files)))


def settings(s: Scenario) -> dict[str, Any]:
    """The file's keys."""
    narrow = s.precision == "fp16" and s.layout != "autocast"  # weights are loaded in fp16: the scaler cannot step them
    if s.precision not in PRECISIONS and not narrow:
        allowed = ", ".join(PRECISIONS)
        raise LaunchError(f"precision: given {s.precision!r}, allowed for a command of axolotl: {allowed}")
    trained = hugging_face.arguments(s)
    found = {
        "base_model": shell.model_name(s.model, variable=True),
        "datasets": [{"path": "DATASET", "type": "completion" if s.task == "pretrain" else "chat_template"}],
        "output_dir": "outputs",
        "sequence_len": s.seq_len,
        "sample_packing": s.packing,
        "attn_implementation": ATTENTION[s.attention],
        "micro_batch_size": s.micro_batch,
        "bf16": s.precision not in ("fp32", "fp16"),
        **({"fp16": True} if narrow else {}),
        **({"activation_offloading": True} if s.offload.activations else {}),
        **({"group_by_length": True} if s.group_by_length else {}),
        "optimizer": trained.pop("optim"),
        **trained,
    }
    if s.task == "dpo":
        found["rl"] = "dpo"
    if s.task == "rm":
        found["reward_model"] = True
    if s.loss == "chunked":
        found["chunked_cross_entropy"] = True
    plugins = []
    if s.loss == "cut":
        plugins.append(CUT)
        found["cut_cross_entropy"] = True
    if s.loss == "fused" or s.kernels == "liger":
        plugins.append(LIGER)
        own = {"liger_rope": True, "liger_rms_norm": True, "liger_glu_activation": True}
        found |= {"liger_fused_linear_cross_entropy": s.loss == "fused", **(own if s.kernels == "liger" else {})}
    if plugins:
        found["plugins"] = plugins
    if s.sharded.family == "fsdp":
        found |= {
            "fsdp_version": s.sharded.stage,
            "fsdp_config": {
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "cpu_ram_efficient_loading": True,  # else every rank of a node builds the whole model in host memory
                "reshard_after_forward": s.reshard_after_forward != "never",
                "offload_params": s.offload.parameters or s.offload.optimizer,
            },
        }
    if s.lora:
        linear = isinstance(s.lora.targets, str)
        found |= {
            "adapter": "lora" if s.load_in_8bit else s.method,
            "load_in_4bit": s.method == "qlora" and not s.load_in_8bit,
            **({"load_in_8bit": True} if s.load_in_8bit else {}),
            **({"quantize_moe_experts": True} if s.quantize_moe_experts else {}),
            "lora_r": s.lora.rank,
            "lora_alpha": 2 * s.lora.rank,
            "lora_dropout": s.lora.dropout,
            **({"lora_target_linear": True} if linear else {"lora_target_modules": list(s.lora.targets)}),
            **({"peft_init_lora_weights": s.lora.init} if s.lora.init != "random" else {}),
            **({"peft_use_dora": True} if s.lora.dora else {}),
            **(
                {"lora_modules_to_save": module_names(s.architecture, s.lora.modules_to_save)}
                if s.lora.modules_to_save
                else {}
            ),
            "peft_autocast_adapter_dtype": s.lora.dtype == "fp32",
            "lora_mlp_kernel": False,
            "lora_qkv_kernel": False,
            "lora_o_kernel": False,
        }
    return found


def notes(s: Scenario, files: dict[str, str]) -> Iterator[str]:
    """Notes on the values that the reader fills in, and on fields that no key sets."""
    yield f"datasets: put the path of your data into {FILE}, and the type that reads it"
    yield from shell.of_files(s, files)
    if not (s.expandable_segments or s.pinned_max_round_threshold_mb):
        yield "expandable_segments false: set PYTORCH_ALLOC_CONF yourself, or axolotl switches them on"
    yield from shell.unsaid(s, *hugging_face.unsaid(s), *FOUR_BITS[s.method])
    yield from shell.unsaid_of_roles(s)
    yield from shell.common_notes(s)
