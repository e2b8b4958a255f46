"""Hints in passing: counts of cards, models and settings in a question's own words."""

from __future__ import annotations

from typing import Any

import pytest

from calc.catalog.catalog import load
from calc.diagnose import hints, names
from calc.diagnose.job import job
from calc.diagnose.reading import read

CATALOG = load()


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("LoRA on 8x A100 80GB", 8), ("on 8 * H20(8 * 96G)", 8), ("4 张 4090", 4), ("四卡A100", 4), ("单机八卡", 8),
        ("A100-80GB x 4", 4), ("two RTX 3090 (24GB)", 2), ("2 nodes with 8x H100 each", 16), ("a 4090", None),
        ("4 GPUs or 8 GPUs, no matter", None), ("GPU 0 has a total capacity", None), ("RTX 4090 24GB", None),
    ],
)  # fmt: skip
def test_the_number_of_cards_in_words(text: str, gpus: int | None) -> None:
    cards = names.cards_named(text, CATALOG)
    assert hints.gpus(text, names.spelled(cards[0].id) if cards else "") == gpus


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("fine-tuning Llama 2 70B crashes", ["Llama 2 70B"]),
        ("微调Qwen2.5-7B-Instruct，显存不足", ["Qwen2.5-7B-Instruct"]),
        ("Qwen/Qwen2.5-7B and qwen2.5-7b are one", ["Qwen/Qwen2.5-7B"]),
        ("对千问2.5-32B模型进行微调", ["Qwen2.5-32B"]), ("通义千问2.5-7B", ["Qwen2.5-7B"]),
        ("File \"a7b.py\", 24.00 GiB, 7B of nothing", []),
    ],
)  # fmt: skip
def test_the_models_that_a_text_names(text: str, named: list[str]) -> None:
    assert hints.models(text, CATALOG) == named


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("用LoRA微调，ZeRO-3，报CUDA out of memory", {"method": "lora", "sharding": "zero3"}),
        ("with QLoRA, batch size 4, sequence length 2048", {"method": "qlora", "micro_batch": 4, "seq_len": 2048}),
        ("global batch size 128 and cpu_offload=False", {}),
        ('File "torch/distributed/fsdp/_runtime_utils.py", line 2, in _pre_forward', {"sharding": "fsdp1"}),
        ("batch size 4, then batch size 8", {}),
        ("on one card with Unsloth", {"trainer": "unsloth"}),
        ("unsloth/llama-3-8b-bnb-4bit in TRL", {"framework": "trl"}),
        ("我用 LLaMA-Factory 微调", {"trainer": "llamafactory"}),
        ("max length 2048, batch size 4", {"micro_batch": 4, "seq_len": 2048}),
        ("32k的序列训不起来", {"seq_len": 32768}),
        ("CPU内存（252G）占满", {"host_memory": 252}), ("GPU内存24G", {}),
        ("vllm_mode colocate", {"rollout.engine": "vllm"}),
    ],
)  # fmt: skip
def test_settings_in_words(text: str, fields: dict[str, Any]) -> None:
    assert dict(hints.fields(text)) == fields


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("运行报OOM，32k的序列训不起来么？", "gpu"),
        ("但多卡时会outofmemory(8卡)", "gpu"),
        ("Why is there still a oom?", "gpu"),
        ("会出现显存不足的问题", "gpu"),
        ("the system RAM usage quickly reaches 500GB, resulting in an error", "host"),
        ("出现该问题时，CPU内存（252G）占满", "host"),
        ("a bloom of roomy memory", None),
        ("GPU内存不足", "gpu"),
    ],
)
def test_memory_that_ran_out_in_words(text: str, kind: str | None) -> None:
    """Once no error: these are sentences of people who pasted no message."""
    found = read(f"{text} Llama 2 7B, A100", CATALOG).error
    assert (found and found.row.kind) == kind


def test_a_job_in_chinese_words_is_diagnosed() -> None:
    """The text of LlamaFactory's issue 7828, once refused as one in which nothing is recognised."""
    found = read("使用4090*4（24G）对千问2.5-32B模型进行微调（Lora 微调，bf16），会出现显存不足的问题。", CATALOG)
    told = {"model": "qwen2.5-32b", "gpu": "rtx4090", "gpus": 4, "method": "lora"}
    assert told.items() <= found.fields.items()
    assert found.error and found.error.row.name == "in-words"


def test_words_tell_the_machine_beside_a_command() -> None:
    command = "llamafactory-cli train --stage sft --model_name_or_path THUDM/glm-4-9b-chat --finetuning_type full"
    assert read(f"{command}\nCPU内存（252G）占满", CATALOG).fields["host_memory"] == 252


def test_an_error_of_vllm_tells_its_context() -> None:
    """Once generation by Transformers, TRL's default, beside an error of vLLM."""
    found = read(
        "ValueError: To serve at least one request with the models's max seq len (262144), (36.00 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (7.81 GiB).\n"
        "TRL's GRPO, Qwen/Qwen3-4B-Instruct-2507, one RTX 4090",
        CATALOG,
    ).fields
    assert (found["rollout.engine"], found["rollout.max_model_len"]) == ("vllm", 262144)


def test_a_job_that_died_in_evaluation_is_told_its_batch() -> None:
    """Transformers evaluates 8 sequences at once unless told, whatever it trains on."""
    trace = 'File "/site-packages/transformers/trainer.py", line 3019, in evaluation_loop\nCUDA out of memory.\n'
    command = "llamafactory-cli train --stage sft --model_name_or_path Qwen/Qwen2.5-7B --finetuning_type lora"
    assert any("8 in Transformers unless set" in note for note in read(trace + command, CATALOG).notes)
    assert not read(f"{trace}{command} --per_device_eval_batch_size 1", CATALOG).notes


def test_two_models_are_asked_about_and_a_command_is_not_overruled() -> None:
    both = "Llama 2 70B or Llama 2 7B: CUDA out of memory"
    assert "model" not in read(both, CATALOG).fields
    command = "python train.py --model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 1 --use_peft False"
    found = read(f"I tried LoRA before.\n{command}", CATALOG)
    assert found.fields["method"] == "full"


def test_a_program_that_a_traceback_shows_is_not_overruled_by_one_in_words() -> None:
    trace = 'File "/site-packages/trl/trainer/sft_trainer.py", line 1, in train\nRuntimeError: CUDA out of memory.'
    found = read(f"with Unsloth it ran, here on an A100:\n{trace}", CATALOG).fields
    assert found["framework"] == "trl" and "trainer" not in found


@pytest.mark.parametrize(
    ("words", "more", "batch"),
    [
        ("4 x A100 40GB", {}, 32),
        ("A100 40GB", {}, 8),
        ("A100 40GB", {"gpus": 2}, 16),
        ("4 x A100 40GB", {"gpus": 2}, 16),
        ("4 x A100 40GB", {"gpus": 2, "global_batch": 64}, 64),
    ],
)
def test_accumulation_goes_over_the_cards_that_words_tell(words: str, more: dict[str, Any], batch: int) -> None:
    """One sequence a GPU, eight micro batches a step; once a step of a single one, beside which an offload took 13
    times as long."""
    command = (
        "llamafactory-cli train --stage sft --model_name_or_path Qwen/Qwen2.5-14B-Instruct --finetuning_type full "
        "--per_device_train_batch_size 1 --gradient_accumulation_steps 8 --bf16 True"
    )
    found = job(read(f"{command}\n{words}", CATALOG), more, CATALOG)
    assert found and found.scenario.global_batch == batch
