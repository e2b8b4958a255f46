"""Configurations that others publish as running: none is called impossible."""

from __future__ import annotations

import shlex

import pytest

from calc.catalog.catalog import load
from calc.recommend import options
from calc.recommend.problem import Problem

# verl's device_tuning.rst and DAPO's script; OpenRLHF's examples/scripts and its table of 70B; the recipes of
# huggingface/alignment-handbook and SmolLM3's; torchtune's README and its recipes for 70B and 405B; axolotl's examples.
RUNS = (
    "--framework verl --task grpo --method full --roles.reference {} --model qwen2-7b --gpu h800 --gpus 2 "
    "--prompt-len 1024 --response-len 1024",
    "--framework verl --task grpo --method full --roles.reference {} --model qwen2.5-14b --gpu h800 --gpus 4 "
    "--prompt-len 1024 --response-len 1024",
    "--framework verl --task grpo --method full --roles.reference {} --model qwen2-72b --gpu h800 --gpus 32 "
    "--prompt-len 512 --response-len 512 --rollout.batch 1024",
    "--framework verl --task grpo --method lora --lora.rank 32 --model qwen2.5-7b --gpu h100-sxm --gpus 1 "
    "--prompt-len 512 --response-len 1024",
    "--framework verl --task grpo --method full --model qwen2.5-32b --gpu h20 --gpus 128 --prompt-len 2048 "
    "--response-len 20480 --rollout.n 16 --rollout.batch 512",
    "--framework openrlhf --task ppo --model llama-3-8b --gpu a100-80-sxm --gpus 8 --prompt-len 1024 "
    "--response-len 1024",
    "--framework openrlhf --task sft --model llama-3-8b --gpu a100-80-sxm --gpus 8 --seq-len 4096 --method full",
    "--framework openrlhf --task rm --model llama-3-8b --gpu a100-80-sxm --gpus 8 --seq-len 8192 --method full",
    "--framework openrlhf --task dpo --model llama-3-8b --gpu a100-80-sxm --gpus 8 --seq-len 8192 --method full",
    "--framework trl --task sft --model mistral-7b --gpu a100-80-sxm --gpus 8 --seq-len 2048 --method full",
    "--framework trl --task dpo --model mistral-7b --gpu a100-80-sxm --gpus 8 --seq-len 1024 --method full",
    "--framework trl --task sft --model mistral-7b --gpu rtx4090 --gpus 1 --seq-len 2048 --method qlora",
    "--framework torch --trainer torchtune --task sft --model llama-3.1-8b --gpu rtx4090 --gpus 1 --method full "
    "--seq-len 2048 --optimizer-in-backward true",
    "--framework torch --trainer torchtune --task sft --model llama-3.1-8b --gpu rtx4090 --gpus 1 --method lora "
    "--seq-len 2048",
    "--framework torch --trainer torchtune --task sft --model llama-3.1-70b --gpu a100-80-sxm --gpus 8 --method "
    "full --seq-len 2048",
    "--framework torch --trainer torchtune --task sft --model llama-3.1-405b --gpu a100-80-sxm --gpus 8 --method "
    "qlora --seq-len 2048",
    "--framework torch --trainer axolotl --task sft --model llama-3.1-70b --gpu rtx3090 --gpus 2 --method qlora "
    "--seq-len 512",
    "--framework trl --task dpo --model smollm3-3b --gpu h100-sxm --gpus 8 --seq-len 8192 --method full",
    "--framework openrlhf --task ppo --model llama-3-70b --gpu a100-80-sxm --gpus 32 --prompt-len 1024 "
    "--response-len 1024",
)


@pytest.mark.parametrize("words", RUNS)
def test_what_is_published_as_running_is_not_called_impossible(words: str) -> None:
    assert Problem(options.read(shlex.split(words), "recommend"), load()).fits()
