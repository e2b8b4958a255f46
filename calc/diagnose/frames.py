"""The phase in which a job died, from the lines of its traceback: a row for each function that tells.

A frame tells most if it is a phase by itself, whatever runs within: loading, saving, handing weights over. Of the rest
the innermost decides, and last of all a forward, which scoring, generating and recomputation run as well.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from calc.diagnose.pasted import LONGEST, Line

WHOLE, INNER, LAST = range(3)


class Row(NamedTuple):
    """A pattern of a line, the phase that it tells, how much it counts, and where such a line is seen.

    A `phase` of "" ends one that an earlier line would tell.
    """

    pattern: str
    phase: str
    counts: int
    seen: str


ROWS: tuple[Row, ...] = (
    # ---- loading
    Row(r"\bin from_pretrained\b|\.from_pretrained\(", "load", WHOLE, "transformers modeling_utils.py"),
    Row(
        r"_load_state_dict|_load_pretrained_model|_load_parameter_into_model",
        "load",
        WHOLE,
        "transformers modeling_utils.py",
    ),
    Row(
        r"\bin load_model_and_tokenizer\b|\bin load_model\b",
        "load",
        WHOLE,
        "LLaMA-Factory model/loader.py; vllm model_runner.py",
    ),
    Row(
        r"deepspeed\.initialize|initialize_optimizer_states|_configure_zero_optimizer|_configure_distributed_model",
        "load",
        WHOLE,
        "deepspeed runtime/engine.py, zero/stage3.py",
    ),
    Row(
        r"_initialize_kv_caches|determine_(?:num_available_blocks|available_memory)|check_enough_kv_cache_memory",
        "load",
        WHOLE,
        "vllm engine/llm_engine.py, v1/core/kv_cache_utils.py",
    ),
    Row(
        r"\bprofile_run\b|_dummy_(?:sampler_)?run\b|_allocate_kv_cache|\binit_device\b|from_engine_args|"
        r"self\.llm = LLM\(",
        "load",
        WHOLE,
        "vllm worker/worker.py, entrypoints/llm.py; trl grpo_trainer.py",
    ),
    Row(
        r"\bin init_model\b|\bin _build_model_optimizer\b|\bin _build_rollout\b|init_model_from_pretrained",
        "load",
        WHOLE,
        "verl workers/fsdp_workers.py; openrlhf trainer/ray/launcher.py",
    ),
    Row(
        r"\bin (?:fully_shard|_auto_wrap|_init_param_handle|flatten_tensors_into_flat_param)\b",
        "load",
        WHOLE,
        "torch distributed/fsdp",
    ),
    Row(r"\bin quantize_4bit\b", "load", WHOLE, "bitsandbytes functional.py, as weights are loaded"),
    # ---- saving
    Row(
        r"\bin (?:save_pretrained|_?save_checkpoint|save_model|_save|save_hf_model)\b|\.save_pretrained\(",
        "save",
        WHOLE,
        "transformers trainer.py; openrlhf utils/deepspeed.py; verl checkpoint_manager",
    ),
    Row(
        r"save_model_and_optimizer_sharded|_consolidated_16bit_state_dict|_full_post_state_dict_hook|"
        r"from state_dict\(\) call",
        "save",
        WHOLE,
        "deepspeed runtime/engine.py; torch fsdp/_state_dict_utils.py",
    ),
    Row(
        r"(?i:(?:OOM|out of memory)(?: error)?(?: occur\w*)? (?:while|when|during) saving)",
        "save",
        WHOLE,
        "in a reader's own words",
    ),
    # ---- handing weights to the engine
    Row(
        r"broadcast_to_vllm|update_weights?(?:_from|\b)|_move_model_to_vllm|sync_(?:model_)?weights|load_dtensor_weights",
        "sync",
        WHOLE,
        "openrlhf trainer/ray/ppo_actor.py; trl grpo_trainer.py; vllm worker; verl third_party/vllm",
    ),
    Row(
        r"sharding_manager(?:/\w+\.py\", line \d+, in __enter__|\.__enter__|:$)|rollout_mode\b",
        "sync",
        WHOLE,
        "verl workers/sharding_manager/fsdp_vllm.py",
    ),
    Row(
        r"\bin (?:wake_up|create_and_map)\b|unwrap_model_for_generation|backload_to_gpu",
        "sync",
        INNER,
        "vllm entrypoints/llm.py, device_allocator/cumem.py; trl models/utils.py",
    ),
    # ---- scoring
    Row(
        r"compute_(?:ref_)?log_?prob\b|compute_values\b|compute_rm_score",
        "score",
        INNER,
        "verl workers/fsdp_workers.py, trainer/ppo/ray_trainer.py",
    ),
    Row(
        r"\bmake_experience|process_experiences|_generate_and_score_completions|compute_reference_log_probs",
        "score",
        INNER,
        "openrlhf trainer/ppo_utils/experience_maker.py; trl grpo_trainer.py",
    ),
    # ---- generating
    Row(
        r"\bgenerate_(?:sequences|samples|vllm)\b|\bin generate\b|\.generate\(|_generate_vllm|execute_model",
        "rollout",
        INNER,
        "verl, openrlhf, vllm worker, transformers generation/utils.py",
    ),
    # ---- the optimizer's step
    Row(
        r"optimizer\.step\(|\bin (?:_take_model_step|_optimizer_step|_init_group|adamw?|_(?:multi_tensor|single_tensor|"
        r"fused)_adamw?)\b",
        "step",
        INNER,
        "torch optim/adamw.py; deepspeed runtime/engine.py; transformers trainer.py",
    ),
    Row(
        r"exp_avg(?:_sq)?\b|zeros_like\(p\b|optimizer_step\b",
        "step",
        INNER,
        "torch optim/adamw.py; verl workers/actor/dp_actor.py",
    ),
    # ---- backward
    Row(
        r"loss\.backward\(|accelerator\.backward\(|_engine_run_backward|run_backward\(",
        "backward",
        INNER,
        "torch autograd/graph.py; transformers trainer.py",
    ),
    Row(
        r"\bin backward\b|\.backward\(|reduce_(?:independent_p_g|ipg)|_post_backward|_pre_backward",
        "backward",
        INNER,
        "torch autograd; deepspeed runtime/engine.py; torch fsdp/_runtime_utils.py",
    ),
    # ---- forward
    Row(
        r"compute_loss\b|\bcross_entropy|log_softmax|logits\.float\(\)|logits\.to\(torch\.float32\)|_convert_to_fp32",
        "forward",
        LAST,
        "transformers trainer.py, loss/loss_utils.py; trl dpo_trainer.py; accelerate utils/operations.py",
    ),
    Row(
        r"\bin (?:\w+_)?loss_function\b|forward_step_calc_loss",
        "forward",
        LAST,
        "slime backends/megatron_utils/loss.py; megatron core/pipeline_parallel/schedules.py",
    ),
    Row(
        r"\bin forward\b|concatenated_forward|lm_head\(|\bin training_step\b",
        "forward",
        LAST,
        "transformers models; trl dpo_trainer.py",
    ),
    # ---- the last bar that was drawn while weights were read, where no line of code is shown
    Row(r"Loading (?:safetensors )?checkpoint shards: +\d?\d%", "load", LAST, "transformers, vllm"),
    Row(r"Loading (?:safetensors )?checkpoint shards: +100%", "", LAST, "transformers, vllm"),
    # ---- a module that moves to the card, where nothing says why
    Row(r"\breturn t\.to\(device\b", "load", LAST, "torch nn/modules/module.py"),
)

_COMPILED = tuple((re.compile(row.pattern), row) for row in ROWS)
_TOTALS = re.compile(r"out of memory|OutOfMemoryError:|No available memory|(?-i:SIGKILL)", re.IGNORECASE)


class Told(NamedTuple):
    """A phase with the line that tells it, and where such lines are seen."""

    phase: str
    line: str
    seen: str


def phase(lines: Sequence[Line], *, beside_code: bool = False) -> Told | None:
    """The phase in which the process that failed first was; None if no line tells.

    `beside_code`: the text holds a script, too, whose lines look like those of a traceback that have no frame above.
    """
    block = _first_failing(lines)
    if beside_code:
        block = [line for n, line in enumerate(block) if any(map(_framed, block[max(0, n - 1) : n + 1]))]
    found: dict[int, Told] = {}
    for line in reversed(block):
        if line.text.startswith(("#", "--")) or re.match(r"\s*(?:--|[\w.+]+=)", line.text):
            continue  # an option of a command
        for pattern, row in _COMPILED:
            if row.counts not in found and pattern.search(line.text[:LONGEST]):
                found[row.counts] = Told(row.phase, line.text.strip()[:200], row.seen)
    told = found[min(found)] if found else None
    return told if told and told.phase else None


def _framed(line: Line) -> bool:
    return bool(re.match(r'\s*File "', line.text))


def _first_failing(lines: Sequence[Line]) -> Sequence[Line]:
    """The lines of the traceback that ends in the first failure, of the process that wrote it; all if none does."""
    end = next((n for n, line in enumerate(lines) if _TOTALS.search(line.text[:LONGEST])), None)
    if end is None:
        return lines
    speaker = lines[end].speaker
    own = [line for line in lines[: end + 1] if line.speaker == speaker]
    starts = [n for n, line in enumerate(own) if line.text.startswith("Traceback (most recent")]
    block = own[starts[-1] :] if starts else own
    return block if any("File" in line.text for line in block) else lines
