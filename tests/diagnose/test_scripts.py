"""Settings in Python code: calls are parsed, names with a literal are followed, and nothing is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from calc.catalog.catalog import load
from calc.diagnose import scripts
from calc.diagnose.reading import read

CATALOG = load()


def test_names_that_the_text_assigns_are_followed() -> None:
    text = 'name = "Qwen/Qwen2.5-7B"  # mine\nlength = 1024\nmodel = AutoModelForCausalLM.from_pretrained(name)\n'
    text += "args = SFTConfig(max_length=length, bf16=True, output_dir=where)"
    found = scripts.settings(text)
    assert found
    assert found.values == {"model_name_or_path": "Qwen/Qwen2.5-7B", "max_length": "1024", "bf16": "true"}
    assert found.program == "trl sft"


def test_lora_and_four_bits_make_qlora() -> None:
    text = (
        'bnb = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)\n'
        'peft_config = LoraConfig(r=64, target_modules="all-linear", lora_dropout=0.1)\n'
        'model = AutoModelForCausalLM.from_pretrained("mistralai/Mistral-7B-v0.1", quantization_config=bnb)\n'
        "trainer = SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=2), peft_config=peft_config)"
    )  # fmt: skip
    said = {"method": "qlora", "lora.rank": 64, "lora.targets": "all-linear", "micro_batch": 2, "framework": "trl"}
    assert said.items() <= read(text, CATALOG).fields.items()


def test_a_command_says_more_than_the_script_that_it_starts() -> None:
    text = (
        "torchrun --nproc_per_node 4 train.py --per_device_train_batch_size 1\n\n"
        'model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B")\n'
        "args = TrainingArguments(per_device_train_batch_size=8, gradient_checkpointing=True)"
    )
    found = read(text, CATALOG).fields
    said = {"gpus": 4, "micro_batch": 1, "checkpointing": "full", "model": "qwen2.5-7b"}
    assert said.items() <= found.items()


def test_the_loading_in_a_script_is_no_frame_of_a_traceback() -> None:
    code = 'model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B")\n'
    error = "torch.OutOfMemoryError: CUDA out of memory."
    frame = 'Traceback (most recent call last):\n  File "torch/_tensor.py", line 581, in backward\n'
    assert read(f"{code}{error}", CATALOG).phase is None
    assert read(f"{code}{frame}{error}", CATALOG).phase == "backward"


@pytest.mark.parametrize(
    "text",
    [
        "SFTConfig(", "SFTConfig(" + "(" * 5000, "TrainingArguments(output_dir=" + "[" * 400 + "]" * 400 + ")",
        "LLM(" * 100_000, "LoraConfig(r=**)", "SFTConfig(a='\x00')", "x = " + "9" * 9999,
    ],
)  # fmt: skip
def test_broken_and_hostile_code_sets_nothing(text: str) -> None:
    assert scripts.settings(text) is None


def test_no_code_is_run(tmp_path: Path) -> None:
    scripts.settings(f"SFTConfig(max_length=open({str(tmp_path / 'x')!r}, 'w').write('a'), bf16=True)")
    assert not list(tmp_path.iterdir())
