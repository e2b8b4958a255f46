"""The parts of pasted text: prefixes, shell words, files, names, errors and frames."""

from __future__ import annotations

from typing import Any

import pytest

from calc.base.units import GiB, MiB
from calc.catalog import oom_message
from calc.catalog.catalog import load
from calc.diagnose import errors, frames, names, pasted, shell
from calc.diagnose.reading import read

CATALOG = load()
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.15 GiB of which 1.00 GiB is "
    "free. Process 7 has 10.00 GiB memory in use. Process 8 has 68.00 GiB memory in use. Of the allocated memory 60.00 "
    "GiB is allocated by PyTorch, and 6.00 GiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("raw", "text", "speaker"),
    [
        ("\x1b[36m(Actor pid=12, ip=10.0.0.1)\x1b[0m   File \"a.py\"", "  File \"a.py\"", "Actor pid=12, ip=10.0.0.1"),
        ("[rank3]:     loss.backward()", "    loss.backward()", "rank3"),
        ("2025-04-25 01:08:59,307 - __main__ - ERROR - Traceback (most", "Traceback (most", ""),
        ("(VllmWorker rank=1 pid=3) ERROR 03-20 03:14:59 [a.py:380] raise X", "raise X", "VllmWorker rank=1 pid=3"),
        ("plain text", "plain text", ""),
    ],
)  # fmt: skip
def test_prefixes_of_a_log_are_taken_off(raw: str, text: str, speaker: str) -> None:
    assert pasted.lines(raw)[0] == (text, speaker)


def test_of_a_long_text_the_end_is_read_whatever_ends_its_lines() -> None:
    job = "[rank0]: torch.OutOfMemoryError: " + MESSAGE
    for blank in ("\n", "\r", "\r\n", "x\n"):
        for before, after, known in ((10**6, 0, True), (0, pasted.LINES, False)):
            told = read(pasted.end(blank * before + job + "\n" + blank * after), CATALOG)
            assert bool(told.parts) is known
    assert pasted.end("a\r\nb") == "a\nb"


def test_only_the_head_of_an_endless_line_is_taken_apart() -> None:
    """Prefixes of it, and words of a command: both are looked for again and again."""
    (line,) = pasted.lines("[rank0]: " * 1000)
    assert line == (("[rank0]: " * 1000)[: 9 * 1000].rstrip()[pasted.LONGEST // 9 * 9 :], "rank0")
    (command,) = shell.commands("torchrun " + "a" * 10**6 + " --b=1")
    assert [len(word) for word in command.words] == [8, 32_768 - 9]


def test_variables_that_double_each_other_fill_no_memory() -> None:
    doubled = "\n".join(("A=x", *["A=$A$A"] * 100, *["torchrun $A --b=$A"] * 1000))
    words = [word for command in shell.commands(doubled) for word in command.words]
    assert len(words) == 3000
    assert max(map(len, words)) <= 2 * pasted.LONGEST
    assert sum(map(len, words)) < 150_000


def test_a_command_is_one_line_with_the_variables_that_the_text_sets() -> None:
    text = (
        'TBS=256\nset -x\nray job submit --address="http://x" -- python3 -m openrlhf.cli.train_ppo_ray \\\n'
        "  --train_batch_size ${TBS} \\ # a comment\n  --pretrain $MODEL"
    )
    found = shell.commands(text)[-1].words
    assert found[found.index("--train_batch_size") + 1] == "256"
    assert shell.unknown(found[-1]) == "MODEL"


def test_what_a_variable_hides_is_named() -> None:
    found = read("python train.py --model_name_or_path $MODEL --per_device_train_batch_size 2 --bf16 True", CATALOG)
    assert found.variables == {"model_name_or_path": "MODEL"}
    assert "model" not in found.fields


@pytest.mark.parametrize(
    ("given", "id", "alike"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b", False),
        ("/data/models/Qwen2.5-7B-Instruct/", "qwen2.5-7b", False),
        ("OpenRLHF/Llama-3-8b-sft-mixture", "llama-3-8b", False),
        ("somebody/Llama-3-8b-sft-on-mine", "llama-3-8b", True),
        ("/hub/models--meta-llama--Meta-Llama-3-8B/snapshots/0a1b", "llama-3-8b", False),
        ("/home/x/qwen-1.5-7B/", "qwen1.5-7b", False),
        ("Qwen2-VL-7B-Instruct", "qwen2-vl-7b", False),
        ("gpt2", "gpt2", False),
        ("bert-base-uncased", None, False),
    ],
)
def test_a_model_is_found_by_name_path_or_parts(given: str, id: str | None, alike: bool) -> None:
    found = names.model(given, CATALOG)
    assert (found.id, found.alike) == (id, alike)


def test_the_card_is_that_of_the_messages_total() -> None:
    cards = [gpu.id for gpu in names.cards_of_size(round(79.15 * GiB), CATALOG)]
    assert "a100-80-sxm" in cards and "h100-sxm" in cards and "a100-40-sxm" not in cards


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("GPU type: NVIDIA A100-SXM4-80GB", ["a100-80-sxm"]),
        ("I use 8 * H20(8 * 96G)", ["h20"]),
        ("on 4 RTX 4090(24G)", ["rtx4090"]),
        ("an A100 and an H100", []),
    ],
)
def test_a_card_that_the_text_names(text: str, ids: list[str]) -> None:
    assert [gpu.id for gpu in names.cards_named(text, CATALOG)] == ids


# ---- messages ------------------------------------------------------------------------------------------------------


def test_a_message_is_found_in_other_text_with_words_broken_over_lines() -> None:
    broken = MESSAGE.replace("allocated by PyTorch", "allocated by P\nyTorch").replace("reserved", "re\nserved")
    assert oom_message.stated(f"rank 1: {broken} and more") == {
        "tried_bytes": 2 * GiB, "total_bytes": round(79.15 * GiB), "free_bytes": GiB, "in_use_bytes": 68 * GiB,
        "allocated_bytes": 60 * GiB, "unallocated_bytes": 6 * GiB, "others_bytes": 10 * GiB,
    }  # fmt: skip


def test_every_recorded_message_is_found_as_it_is_read_whole() -> None:
    for record in CATALOG.exhausted:
        found = oom_message.stated(f"x {record['quote']} y")
        assert found is not None
        whole = oom_message.figures(record["quote"])
        assert {name: found.get(name) for name in whole} == whole, record["id"]


def test_a_message_that_was_cut_off_gives_what_is_left() -> None:
    assert oom_message.stated("Tried to allocate 14.00 MiB. GPU 0 has a total") == {"tried_bytes": 14 * MiB}
    assert oom_message.stated("nothing of the kind") is None


@pytest.mark.parametrize(
    ("line", "name", "kind"),
    [
        (MESSAGE, "cuda", "gpu"),
        ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB.", "cuda", "gpu"),
        ("RuntimeError: CUDA error: out of memory", "cuda-error", "gpu"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "cublas", "gpu"),
        ("ncclUnhandledCudaError: Cuda failure 2 'out of memory'", "nccl", "gpu"),
        ("ValueError: No available memory for the cache blocks.", "vllm-no-cache", "vllm"),
        ("ValueError: Free memory on device is less than desired GPU memory utilization (0.9)", "vllm-share", "vllm"),
        ("max seq len (32768) is larger than the maximum number of tokens", "vllm-short-cache", "vllm"),
        ("CUDA out of memory occurred when warming up sampler with 1024 requests.", "vllm-warming", "vllm"),
        ("[alloc_cpu.cpp:75] DefaultCPUAllocator: can't allocate memory", "host-allocation", "host"),
        ("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.", "ray-host", "host"),
        ("3 Workers (tasks / actors) killed due to memory pressure (OOM)", "ray-host", "host"),
        ("exits with return code = -9", "killed", "host"),
        ("Killed", "killed", "host"),
    ],
)  # fmt: skip
def test_each_error_says_whose_memory_is_short(line: str, name: str, kind: str) -> None:
    found = errors.error(pasted.lines(f"some log\n{line}\nmore"))
    assert found and (found.row.name, found.row.kind) == (name, kind)


def test_the_handler_of_deepspeeds_launcher_is_no_kill() -> None:
    assert (
        errors.error(pasted.lines("[ERROR] [launch.py:325:sigkill_handler] ['python'] exits with return code = 1"))
        is None
    )


@pytest.mark.parametrize(
    ("lines", "phase"),
    [
        (["in from_pretrained", "in _load_state_dict_into_meta_model", "param = param[...]"], "load"),
        (["deepspeed.initialize(", "initialize_optimizer_states", "self.optimizer.step()"], "load"),
        (["in training_step", "accelerator.backward(loss)", "in backward", "in forward"], "backward"),
        (["accelerator.backward(loss)", "self.engine.step()", "in _take_model_step", "zeros_like(p"], "step"),
        (["in training_step", "in compute_loss", "in forward", "logits.float()"], "forward"),
        (["in fit", "in make_experience", "in forward", "lm_head("], "score"),
        (["compute_ref_log_prob(batch)", "in forward"], "score"),
        (["in generate_sequences", 'sharding_manager/fsdp_vllm.py", line 79, in __enter__'], "sync"),
        (["in broadcast_to_vllm", "in forward"], "sync"),
        (["in train", "in _save_checkpoint", "state_dict = x"], "save"),
        (["in generate", "in forward"], "rollout"),
        (["--save_steps 20", "nothing that tells"], None),
    ],
)
def test_the_phase_of_a_traceback(lines: list[str], phase: str | None) -> None:
    text = "Traceback (most recent call last):\n" + "\n".join(f'  File "x.py", line 1\n  {line}' for line in lines)
    found = frames.phase(pasted.lines(f"{text}\ntorch.OutOfMemoryError: CUDA out of memory."))
    assert (found.phase if found else None) == phase


def test_the_process_that_failed_first_is_read_and_not_one_that_waits() -> None:
    text = (
        '(A pid=1) Traceback (most recent call last):\n(A pid=1)   File "x.py", line 1, in make_experience\n'
        "(B pid=2)   loss.backward()\n(A pid=1) torch.OutOfMemoryError: CUDA out of memory."
    )
    found = frames.phase(pasted.lines(text))
    assert found and found.phase == "score"


# ---- whole readings ------------------------------------------------------------------------------------------------


def test_a_scenario_is_read_beside_fields_that_it_does_not_have() -> None:
    text = "model: llama-3-8b\ntask: sft\ngpu: h100-sxm\ngpus: 8\nframework: openrlhf\nowner: me\nmicro_batch: lots"
    found = read(text, CATALOG)
    assert found.parts == ["a scenario"]
    assert found.fields | {"notes": None} == {
        "model": "llama-3-8b", "task": "sft", "gpu": "h100-sxm", "gpus": 8, "framework": "openrlhf", "notes": None,
    }  # fmt: skip
    assert found.unread == ["owner"]
    assert any(note.startswith("micro_batch: given 'lots'") for note in found.notes)


YAML: dict[str, dict[str, Any]] = {
    "model_name_or_path: meta-llama/Meta-Llama-3-8B\nstage: sft\nfinetuning_type: lora\nlora_rank: 16\n"
    "cutoff_len: 2048\nper_device_train_batch_size: 2\ndeepspeed: ds_z3_config.json": {
        "model": "llama-3-8b", "task": "sft", "method": "lora", "lora.rank": 16, "seq_len": 2048, "micro_batch": 2,
        "sharding": "zero3", "trainer": "llamafactory",
    },
    "base_model: mistralai/Mistral-7B-v0.1\nadapter: qlora\nsequence_len: 4096\nsample_packing: true\n"
    "micro_batch_size: 2\ngradient_checkpointing: true\nflash_attention: true\nload_in_4bit: true": {
        "model": "mistral-7b-v0.1", "method": "qlora", "seq_len": 4096, "packing": True, "checkpointing": "full",
        "attention": "flash", "trainer": "axolotl",
    },
}  # fmt: skip


@pytest.mark.parametrize("text", YAML)
def test_files_of_other_trainers_are_read_where_they_mean_the_same(text: str) -> None:
    found = read(text, CATALOG).fields
    assert {name: found.get(name) for name in YAML[text]} == YAML[text]


def test_older_flags_of_openrlhf_are_read_as_a_release_of_their_age() -> None:
    text = (
        "deepspeed --module openrlhf.cli.train_sft --pretrain meta-llama/Meta-Llama-3-8B --micro_train_batch_size 4 "
        "--zero_stage 2 --bf16 --adam_offload --max_len 4096 --gradient_checkpointing"
    )
    found = read(text, CATALOG)
    assert found.fields["framework"] == "openrlhf==0.9"
    assert (found.fields["micro_batch"], found.fields["sharding"], found.fields["offload.optimizer"]) == (
        4,
        "zero2",
        True,
    )
    assert found.unread == []


def test_a_flag_that_may_matter_and_is_not_known_is_named() -> None:
    text = "trl sft --model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 1 --layers_per_gpu 4"
    assert read(text, CATALOG).unread == ["layers_per_gpu"]


@pytest.mark.parametrize("row", errors.ROWS, ids=lambda row: row.name)
def test_the_example_of_an_error_is_read_as_that_error(row: errors.Row) -> None:
    """The guide shows it beside the sentence that the diagnosis says of it."""
    found = errors.error(pasted.lines(row.example))
    assert found is not None
    assert found.row is row
