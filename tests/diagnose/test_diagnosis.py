"""A diagnosis: cause, agreement, remedies and their spelling, the command line, and any text at all."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from commands import Run
from hypothesis import given, settings
from hypothesis import strategies as st

from calc.base.schema import InputError
from calc.base.units import GiB, gb
from calc.catalog.catalog import load
from calc.diagnose import diagnose, remedies
from calc.diagnose.spelled import diff
from calc.diagnose.text import as_dict, compared, text

CATALOG = load()
SFT = (
    "deepspeed --num_gpus 4 --module openrlhf.cli.train_sft --pretrain meta-llama/Meta-Llama-3-8B --max_len 2048 "
    "--micro_train_batch_size 8 --train_batch_size 128 --zero_stage 2 --bf16 --flash_attn --packing_samples\n"
)
FITS = (
    "model: llama-3-8b\ntask: sft\ngpu: h100-sxm\ngpus: 8\nframework: openrlhf\nsharding: zero3\ncheckpointing: full\n"
)
ERROR = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB "
    "of which 1.00 GiB is free. Process 8 has 68.00 GiB memory in use. Of the allocated memory 50.00 GiB is allocated "
    "by PyTorch, and 17.00 GiB is reserved by PyTorch but unallocated.\n"
)
HOST = "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"


def test_a_smaller_micro_batch_in_the_spelling_of_the_command() -> None:
    found = diagnose(SFT + ERROR)
    first = found.remedies[0]
    assert found.job and first.names == ("smaller micro batch",)
    assert first.fits and first.learns == "nothing" and first.time and first.time > 1
    assert first.peak < first.estimate.groups[0].usable_bytes
    changed = diff(found.job, first, found.reading, CATALOG)
    assert changed == [f"--micro_train_batch_size 8 → --micro_train_batch_size {first.changes['micro_batch']}"]


def test_remedies_that_fit_come_first_and_of_these_those_that_learn_the_same() -> None:
    found = diagnose(SFT + ERROR).remedies
    verdicts = [remedy.estimate.verdict for remedy in found]
    assert verdicts == sorted(verdicts, key=("fits", "tight", "oom").index)
    learns = [remedy.learns for remedy in found if remedy.fits]
    assert learns == sorted(learns, key=("nothing", "numerics", "what is learned").index)


def test_settings_that_no_pair_of_changes_finds_are_searched_before_what_is_learned_gives_way() -> None:
    """Once QLoRA came first for full fine-tuning of 8B on two cards of 80 GB, which sharded bf16 weights do."""
    found = diagnose(
        "accelerate launch --num_processes 2 train.py --model_name_or_path meta-llama/Llama-3.1-8B --bf16 True "
        "--per_device_train_batch_size 4 --gradient_accumulation_steps 4 --max_seq_length 4096\n" + ERROR
    ).remedies
    first = found[0]
    assert first.names == ("the configuration that recommend finds",) and first.fits and not first.machine
    assert first.learns == "numerics" and first.changes["precision"] == "bf16"
    assert all(each.learns == "what is learned" for each in found[1:] if each.fits)


def test_a_file_of_settings_is_changed_by_dotted_keys() -> None:
    found = diagnose(
        "llamafactory-cli train --stage sft --model_name_or_path Qwen/Qwen2.5-14B-Instruct --finetuning_type full "
        "--deepspeed examples/deepspeed/ds_z3_config.json --cutoff_len 8192 --bf16 True --flash_attn fa2\n"
        "4 x A100 40GB\n" + ERROR
    )
    offload = next(each for each in found.remedies if each.names == ("offload the optimizer",))
    key = "zero_optimization.offload_optimizer.device"
    assert found.job
    assert f"deepspeed.json: {key}: none → cpu" in diff(found.job, offload, found.reading, CATALOG)


def test_the_cause_names_the_logits_with_their_tokens() -> None:
    assert "the logits of 16,384 tokens over 128,256 words" in diagnose(SFT + ERROR).cause


def test_the_message_is_set_beside_the_estimate() -> None:
    said = "\n".join(diagnose(SFT + ERROR + "  loss.backward()").agrees)
    assert "fragmentation: 17.0 GiB are reserved but unallocated" in said
    assert "belong to no process that the message lists" in said
    assert "phase: " in said


def test_a_job_that_fits_by_the_estimate_is_said_to_and_what_frees_most_is_named() -> None:
    found = diagnose(f"{FITS}\n{ERROR}  loss.backward()")
    assert found.estimate and found.estimate.verdict == "fits"
    assert any(line.startswith("the estimate says that this job fits") for line in found.agrees)
    assert found.where == "backward"
    assert found.remedies and all(remedy.fits for remedy in found.remedies)


def test_short_host_memory_has_remedies_for_the_host() -> None:
    job = FITS.replace("8b", "70b").replace("h100", "a100-80") + "offload.optimizer: true\nhost_memory: 256\n"
    found = diagnose(f"{job}micro_batch: 1\nseq_len: 1024\n\n{HOST}")
    assert found.host and found.cause.startswith("Host memory, ")
    assert found.estimate and f" a node of {gb(found.estimate.host_memory.bytes)}; " in found.cause
    before = found.estimate.host_peak if found.estimate else 0
    assert any("host memory" in " ".join(remedy.names) for remedy in found.remedies)
    for remedy in found.remedies:
        assert remedy.fits or remedy.estimate.host_peak < before


def test_host_memory_that_ran_out_means_offload_where_the_cards_are_too_small() -> None:
    """Issue 1871 of torchtune: 500 GB of host memory were full, and 14 of 24 GB of each card; once no offload."""
    found = diagnose(
        "I am fine-tuning Llama 3.1 (70B) using the torchtune framework on 8 NVIDIA 4090 GPUs, each with 24GB VRAM, "
        "and 500GB system RAM. During the full fine-tuning process the system RAM usage quickly reaches 500GB."
    )
    assert found.job and found.job.scenario.offload.parameters
    assert found.estimate and found.estimate.on_host
    assert found.agrees[0].endswith("the estimate agrees")
    assert {each.field for each in found.job.assumed if "host memory ran out" in each.why} == {
        "offload.optimizer", "offload.parameters"
    }  # fmt: skip


def test_fsdp_offloads_weights_and_optimizer_by_one_setting() -> None:
    """Once twice with the same change of the command, at different times."""
    found = diagnose(
        "base_model: mistralai/Mistral-Nemo-Instruct-2407\nadapter: lora\nsequence_len: 4096\nmicro_batch_size: 2\n"
        "gradient_accumulation_steps: 16\nfsdp:\n  - full_shard\nfsdp_config:\n  fsdp_offload_params: false\n"
        "# CUDA out of memory on 2x 3090 Ti with axolotl\n"
    )
    names = [name for remedy in found.remedies for name in remedy.names]
    assert "offload weights and optimizer" in names
    assert "offload the optimizer" not in names
    more = next(remedy for remedy in found.remedies if remedy.names == ("more GPUs",))
    assert found.job and diff(found.job, more, found.reading, CATALOG)[0] == f"gpus: 2 → {more.changes['gpus']}"


def test_what_frees_memory_is_compared_in_the_phase_that_died() -> None:
    """Once by the peak of all phases, which more GPUs for each engine of vLLM raised from 59.1 to 59.8 GiB."""
    command = (
        "python3 -m openrlhf.cli.train_ppo_ray --ref_num_nodes 1 --ref_num_gpus_per_node 8 --actor_num_nodes 1 "
        "--actor_num_gpus_per_node 8 --vllm_num_engines 8 --vllm_tensor_parallel_size 1 --colocate_all_models "
        "--vllm_gpu_memory_utilization 0.6 --pretrain Qwen/Qwen2.5-7B-Instruct --micro_train_batch_size 2 "
        "--train_batch_size 128 --micro_rollout_batch_size 4 --rollout_batch_size 128 --n_samples_per_prompt 8 "
        "--prompt_max_len 2048 --generate_max_len 1024 --advantage_estimator group_norm --zero_stage 3 --bf16 "
        "--gradient_checkpointing --packing_samples --vllm_enable_sleep --deepspeed_enable_sleep\n"
    )
    trace = 'File "/openrlhf/utils/deepspeed/deepspeed.py", line 412, in save_model\n'
    found = diagnose(trace + ERROR + command)
    assert found.where == "save" and found.estimate and found.estimate.verdict == "fits"
    assert found.remedies
    for remedy in found.remedies:
        assert compared(found, remedy.estimate) < compared(found, found.estimate)


def test_reinforcement_learning_with_unsloth_is_trls_with_adapters() -> None:
    """Issue 3411 of Unsloth: once plain PyTorch's full training with a reward model, of 1,540 GiB on one card."""
    found = diagnose(
        "OOM for GPT OSS 120b on 183GB of VRAM (B200), GRPO with unsloth\n" + ERROR.replace("79.15", "178.35")
    )
    assert found.job
    s = found.job.scenario
    assert (s.framework, s.method, s.precision) == ("trl", "qlora", "bf16")
    assert len(found.job.left_out) == len({*found.job.left_out})


def test_a_remedy_with_which_vllm_does_not_start_says_so() -> None:
    """Once out of memory, at a peak of 56.8 of 79.1 GiB: the reference model leaves vLLM too little of the card."""
    found = diagnose(
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=64 "
        "actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B model_engine=megatron "
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 actor_rollout_ref.actor.use_kl_loss=True "
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 "
        "actor_rollout_ref.actor.megatron.expert_model_parallel_size=4 actor_rollout_ref.rollout.name=vllm "
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.tensor_model_parallel_size=4 "
        "trainer.n_gpus_per_node=8 trainer.nnodes=4\n",
        {"gpu": "h100-sxm"},
    )
    lines = text(found, CATALOG).splitlines()
    assert any(": vLLM does not start, " in line for line in lines)
    for line in lines:
        assert ": out of memory, " not in line


def test_defaults_of_a_trainer_are_its_own() -> None:
    """Once all those of plain PyTorch."""
    found = diagnose(
        "llamafactory-cli train --stage sft --model_name_or_path Qwen/Qwen2.5-7B --finetuning_type lora",
        {"gpu": "a100-80-sxm"},
    )
    why = {each.field: each.why for each in found.job.assumed} if found.job else {}
    assert why["checkpointing"].startswith("the default of llamafactory ")


def test_pinned_memory_that_is_not_rounded_is_a_remedy_for_the_host() -> None:
    """Llama 2 70B on four GPUs saves in 1,533 GB of host memory, and in 1,380 without rounding."""
    job = FITS.replace("llama-3-8b", "llama-2-70b").replace("h100-sxm", "a800-80").replace("gpus: 8", "gpus: 4")
    found = diagnose(f"{job}offload.optimizer: true\nhost_memory: 1500\nmicro_batch: 1\nseq_len: 1024\n\n{HOST}")
    remedy = next(each for each in found.remedies if each.names == ("pinned memory that is not rounded",))
    assert remedy.fits and remedy.learns == "nothing"
    assert found.job and diff(found.job, remedy, found.reading, CATALOG) == [
        "PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:64,pinned_max_cached_size_mb:64"
    ]


def test_a_threshold_in_the_pasted_command_is_read() -> None:
    told = SFT.replace("deepspeed", "PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:256 deepspeed", 1)
    assert diagnose(told + ERROR).reading.fields["pinned_max_round_threshold_mb"] == 256


@pytest.mark.parametrize("said", ["OMP_NUM_THREADS=14 deepspeed", "accelerate launch --num_cpu_threads_per_process 14"])
def test_threads_in_the_pasted_command_are_read(said: str) -> None:
    told = SFT.replace("deepspeed", said, 1)
    assert diagnose(told + ERROR).reading.fields["cpu_threads"] == 14
    assert "cpu_threads" not in diagnose(SFT + ERROR).reading.fields


def test_a_job_that_ran_a_model_newer_than_its_frameworks_transformers_had_a_newer_one() -> None:
    """TRL 0.16 allows the Transformers that brought Qwen3, a month after it; the framework is kept."""
    d = diagnose("model: qwen3-8b\ntask: sft\nframework: trl==0.16.0\ngpu: h100-sxm\n", {}, CATALOG)
    assert d.job
    s = d.job.scenario
    assert (s.framework, s.framework_version, s.versions["transformers"]) == ("trl", "0.16.0", "4.51.0")
    assert "lacks qwen3" in d.job.left_out[0]


def test_what_cannot_be_told_is_asked_once() -> None:
    found = diagnose(ERROR)
    assert [question.partition("?")[0] for question in found.questions] == ["Which model is trained"]
    assert found.reading.fields["gpu"]


RAY = (
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"
    "Memory on the node (IP: 10.0.0.5) where the task (actor ID: 1f, name=WorkerDict.__init__, pid=33, memory used="
    "92.41GB) was running was 957.55GB / 1006.84GB (0.951040), which exceeds the memory usage threshold of 0.95."
)


def test_rays_message_tells_the_nodes_memory_and_that_its_workers_do_reinforcement_learning() -> None:
    """Ray divides by 1024³ and writes GB: 1006.84 of them are 1081 GB, which is what such a node was sold with."""
    found = diagnose(RAY)
    assert found.reading.fields["host_memory"] == 1081 and found.reading.fields["task"] == "grpo"
    assert found.agrees[0].startswith("the node: 1,028 GB of 1,081 GB were in use")
    whole = diagnose(RAY, {"model": "qwen2.5-7b", "gpu": "h100-sxm", "gpus": 8})
    assert whole.estimate and whole.estimate.scenario.host_memory == 1081
    assert diagnose(RAY, {"host_memory": 512, "model": "qwen2.5-7b", "gpu": "h100-sxm"}).job.scenario.host_memory == 512
    critic = diagnose(RAY.replace("__init__", "critic_compute_values") + "\n  in compute_values")
    assert critic.reading.fields["task"] == "ppo"


def test_what_nobody_said_is_told_as_assumed_and_not_as_recognised(run: Callable[..., Run]) -> None:
    """Once `task sft` stood under what was recognised; and an exception's name was a setting not understood."""
    settings = "per_device_train_batch_size: 4\nbf16: true"
    said = run("diagnose", "-", "--model", "llama-3-8b", stdin=f"{ERROR}\n{settings}").out
    recognised = said.partition("error:")[0]
    assert "micro_batch 4" in recognised and "task" not in recognised
    assert "assumed: task sft, nothing says what is trained" in said and "not understood" not in said
    nothing = run("diagnose", "-", stdin=RAY).out
    assert "task" not in nothing.partition("error:")[0] and "assumed: task grpo" in nothing


def test_options_complete_what_the_text_leaves_open(run: Callable[..., Run]) -> None:
    found = run("diagnose", "-", "--model", "llama-3-8b", "--json", stdin=ERROR)
    answer = json.loads(found.out)
    assert found.status == 0
    assert run("diagnose", "--model", "llama-3-8b", "--json", "-", stdin=ERROR).out == found.out
    assert answer["estimate"]["scenario"]["model"] == "llama-3-8b"
    assert answer["message"]["tried_bytes"] == 2 * GiB
    assert answer["questions"] == []


def test_text_in_which_nothing_is_recognised_is_refused_in_one_line(run: Callable[..., Run]) -> None:
    found = run("diagnose", "-", stdin="a poem about clouds\n")
    assert (found.status, found.out) == (2, "")
    assert found.err.strip() == (
        "standard input: given text in which nothing is recognised, allowed: a launch command, an error message, the "
        "end of a log, or a scenario"
    )


def test_the_text_of_an_answer_has_all_its_parts(run: Callable[..., Run]) -> None:
    said = run("diagnose", "-", stdin=SFT + ERROR).out
    for part in (
        "recognised: a launch command, an error message",
        "assumed: ",
        "out of memory in ",
        "remedies",
        "changes nothing",
    ):
        assert part in said


PIECES = st.sampled_from([
    SFT, ERROR, HOST, FITS, "--zero_stage", "--micro_train_batch_size -1", "{", "}", "'", '"', "\\", "\x1b[31m",
    "(A pid=1)",
    "trl grpo --num_generations 0 --beta x", '{"zero_optimization": {"stage": 9}, "a": [', "gpus: 99999999", "model: 5",
    "actor_rollout_ref.rollout.n=1e9 data.max_prompt_length=[]", "task: [1]", "$X ${Y:?z} `", "micro_batch: .inf",
    "Traceback (most recent call last):", "roles: {actor: none}",
    "Tried to allocate 1.2.3 GiB. GPU 0 has a total capacity of 0 bytes of which",
])  # fmt: skip


@settings(max_examples=60)
@given(st.lists(st.one_of(PIECES, st.text(max_size=60)), max_size=6).map("\n".join))
def test_any_text_is_answered_or_refused_in_one_line(pasted: str) -> None:
    try:
        found = diagnose(pasted)
    except InputError as error:
        assert str(error).isprintable()
        return
    assert text(found, CATALOG).endswith("\n")
    json.dumps(as_dict(found, CATALOG))


@pytest.mark.parametrize("more", [{"gpu": "h100-sxm", "model": "llama-3-8b", "gpus": 4}, {"method": "lora"}])
def test_what_is_said_beside_the_text_overrides_it(more: dict[str, object]) -> None:
    found = diagnose(SFT + ERROR, more)
    assert found.estimate
    for name, value in more.items():
        assert getattr(found.estimate.scenario, name) == value


def test_remedies_beyond_the_bound_on_replays_are_computed_without_and_a_note_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    died = f"model: qwen2.5-1.5b\ntask: sft\ngpu: rtx4090\nframework: torch\nseq_len: 8192\n{ERROR}"
    whole = diagnose(died)
    monkeypatch.setattr(remedies, "EVENTS", 0)
    found = diagnose(died)
    (note,) = set(found.reading.notes) - set(whole.reading.notes)
    assert note.startswith("the allocator is not replayed for all remedies")
    assert found.remedies and not any(g.events for each in found.remedies for g in each.estimate.groups)
    assert any(g.events for each in whole.remedies for g in each.estimate.groups)
