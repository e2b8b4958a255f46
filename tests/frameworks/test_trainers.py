"""The trainers of plain PyTorch: what a job that names one gets, its step by hand, and what is refused or noted."""

from __future__ import annotations

import re
from collections import Counter
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
from jobs import P, engine_of, job

from calc.base.plan import Path
from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.frameworks.torch.trainers import torchtune
from calc.frameworks.torch.trainers.registry import ON_TRANSFORMERS, REINFORCES, RELEASED, TRAINERS
from calc.models.architecture import parameters
from calc.models.lora import adaptable_names
from calc.resolve.parse import parse
from calc.scenario.scenario import SCHEMA, Scenario, ScenarioError
from calc.scenario.words import RL, Trainer
from calc.step.placement import engine, replica

# Adapters of rank 8 on all linears of Llama 3 8B: 32 layers of 8 (2 (4096 + 4096) + 2 (4096 + 1024) + 3 (4096 + 14336))
ADAPTERS = 20_971_520


def run(trainer: str, **fields: Any) -> Scenario:
    """A job of a trainer."""
    return job(trainer=trainer, **fields)


def step(s: Scenario) -> Counter[str]:
    """Bytes by component at the peak of the optimizer's step, but for what libraries take to compute in."""
    (group,) = estimate(s).groups
    (phase,) = (phase for phase in group.phases if phase.name == "step")
    return Counter({line.component: line.bytes for line in phase.moment.lines if line.allocated}) - Counter(
        workspace=1 << 40
    )


def test_every_trainer_of_the_contract_has_a_module() -> None:
    words = SCHEMA["properties"]["trainer"]["enum"]
    assert ["own", *TRAINERS] == words
    assert set(ON_TRANSFORMERS) < set(words)
    assert words == list(Trainer.__args__)  # type: ignore[attr-defined]
    assert {name for name, module in TRAINERS.items() if hasattr(module, "RELEASES")} == set(RELEASED)
    assert set(RELEASED) < set(SCHEMA["properties"]["versions"]["properties"])


def test_every_trainer_answers_or_refuses_every_task_and_method() -> None:
    """Once a KeyError: Unsloth, whose releases RL does not fill in, asked for its own copy of a model in four bits."""
    tasks, methods = SCHEMA["properties"]["task"]["enum"], SCHEMA["properties"]["method"]["enum"]
    for trainer, task, method in product(("own", *TRAINERS), tasks, methods):
        asked = {"model": "qwen3-vl-8b", "gpu": "h100-sxm", "trainer": trainer, "task": task, "method": method}
        with suppress(ScenarioError):
            parse(asked, catalog=load())


@pytest.mark.parametrize(
    ("trainer", "fields", "weights", "gradients", "states"),
    [
        # LLaMA-Factory upcasts what it trains: 4 + 4 + 8 bytes a parameter, whole
        ("llamafactory", {"method": "full"}, 4 * P, 4 * P, 8 * P),
        # Axolotl and ms-swift train bf16 weights: 2 + 2 + 4
        ("axolotl", {}, 2 * P, 2 * P, 4 * P),
        ("ms-swift", {"method": "full"}, 2 * P, 2 * P, 4 * P),
        # over eight GPUs Axolotl's own FSDP 2 leaves bf16; FSDP 1 is Accelerate's, which makes fp32 of it
        ("axolotl", {"gpus": 8, "sharding": "fsdp2"}, 2 * P / 8, 2 * P / 8, 4 * P / 8),
        ("axolotl", {"gpus": 8, "sharding": "fsdp1"}, 4 * P / 8, 4 * P / 8, 8 * P / 8),
        ("ms-swift", {"gpus": 8, "sharding": "fsdp2", "method": "full"}, 4 * P / 8, 4 * P / 8, 8 * P / 8),
        # torchtune: bf16 shards; paged states of 8 bits on one GPU
        ("torchtune", {"gpus": 8}, 2 * P / 8, 2 * P / 8, 4 * P / 8),
        ("torchtune", {"optimizer_in_backward": False}, 2 * P, 2 * P, 0),
        # torchtitan: fp32 shards
        ("torchtitan", {"gpus": 8, "task": "pretrain"}, 4 * P / 8, 4 * P / 8, 8 * P / 8),
    ],
)
def test_a_step_of_all_weights_by_hand(
    trainer: str, fields: dict[str, Any], weights: float, gradients: float, states: float
) -> None:
    found = step(run(trainer, **fields, seq_len=512, micro_batch=1))
    expected = {"weights": weights, "gradients": gradients, "optimizer_states": states}
    assert dict(found) == {name: size for name, size in expected.items() if size}


@pytest.mark.parametrize(
    ("trainer", "fields", "base", "rank", "states"),
    [
        ("llamafactory", {"method": "lora"}, 2 * P, 8, 8),  # Adam's two moments in fp32
        ("ms-swift", {"method": "lora"}, 2 * P, 8, 8),
        # `unsloth train`: rank 64, two moments of a byte, and an fp32 scale for each 256 of them
        ("unsloth", {"method": "lora"}, 2 * P, 64, 2 * (1 + 4 / 256)),
    ],
)
def test_a_step_of_adapters_by_hand(
    trainer: str, fields: dict[str, Any], base: float, rank: int, states: float
) -> None:
    """Adapters of PEFT are fp32 beside a base of 16 bits: 4 + 4 bytes a parameter, and their optimizer's."""
    adapters = ADAPTERS * rank // 8
    found = step(run(trainer, **fields, seq_len=512, micro_batch=1))
    expected = {
        "weights": base,
        "adapter": 4 * adapters,
        "gradients": 4 * adapters,
        "optimizer_states": states * adapters,
    }
    assert dict(found) == expected


@pytest.mark.parametrize(
    ("trainer", "fields", "expected"),
    [
        (
            "llamafactory",
            {},
            {"method": "full", "seq_len": 2048, "micro_batch": 8, "checkpointing": "full", "loss": "full"},
        ),
        ("llamafactory", {"versions__llamafactory": "0.9.0"}, {"seq_len": 1024, "optimizer_impl": "foreach"}),
        ("llamafactory", {"sharding": "zero3", "gpus": 8}, {"precision": "mixed", "grad_dtype": "bf16"}),
        ("llamafactory", {"task": "pretrain"}, {"packing": True}),
        ("axolotl", {}, {"seq_len": 512, "checkpointing": "none", "expandable_segments": True, "method": "full"}),
        ("axolotl", {"task": "dpo"}, {"logprob": "selective"}),
        ("ms-swift", {"gpus": 4}, {"global_batch": 16, "micro_batch": 1, "checkpointing": "full"}),
        ("ms-swift", {"gpus": 24}, {"global_batch": 24}),
        (
            "torchtune",
            {"method": "lora", "gpus": 8},
            {"checkpointing": "none", "sharding": "fsdp2", "global_batch": 128},
        ),
        ("torchtune", {"method": "lora"}, {"checkpointing": "full", "loss": "chunked", "optimizer_impl": "fused"}),
        ("torchtitan", {"gpus": 8}, {"precision": "fsdp-mixed", "checkpointing": "selective", "loss": "chunked"}),
        ("torchtitan", {"versions__torchtitan": "0.2"}, {"loss": "full", "sharding": "none", "precision": "autocast"}),
        ("torchtitan", {}, {"sharding": "fsdp2", "precision": "fsdp-mixed"}),
        (
            "torchtitan",
            {"gpus": 16, "tensor_parallel": 2, "pipeline_parallel": 2},
            {"sequence_parallel": True, "loss": "full", "micro_batch": 1, "global_batch": 8},
        ),
        ("unsloth", {"method": "qlora"}, {"loss": "fused", "global_batch": 8, "optimizer": "adamw-8bit"}),
    ],
)
def test_a_trainers_habits_are_the_defaults(trainer: str, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    s = run(trainer, **fields)
    assert {name: getattr(s, name) for name in expected} == expected


def test_whose_orpo_and_simpo_have_a_cross_entropy() -> None:
    """ms-swift's SimPO is CPOTrainer's with cpo_alpha 1; LLaMA-Factory's ORPO takes its log-probabilities for it."""
    found = {
        (trainer, task): run(trainer, task=task).keeps.roles[0].path.nll
        for trainer in ("ms-swift", "llamafactory")
        for task in ("orpo", "simpo")
    }
    assert found == {
        ("ms-swift", "orpo"): 0.5, ("ms-swift", "simpo"): 0.5,
        ("llamafactory", "orpo"): 0, ("llamafactory", "simpo"): 0,
    }  # fmt: skip


def test_ms_swifts_dpo_had_a_cross_entropy_of_the_chosen_half() -> None:
    """`rlhf_trainer/dpo_trainer.py` of 3.4.1, 3.5.0 and 3.5.1, where `rpo_alpha` is 1, and of 3.8.0, where it is none.

    3.4.1 normalises a slice of all logits, and `get_nll_loss` the chosen half; 3.5.0 rolls labels, and goes row by row;
    3.5.1 takes the mean of the log-probabilities there are.
    """
    found = {}
    for version in ("2.5", "3.4.1", "3.5.0", "3.5.1", "3.8.0"):
        s = run("ms-swift", task="dpo", gpus=4, sharding="zero3", versions={"ms-swift": version})
        path = s.keeps.roles[0].path
        found[version] = s.sft_alpha, path.kind, path.nll, path.kept < 1
    assert found == {
        "2.5": (1, "log-softmax", 0.5, True), "3.4.1": (1, "log-softmax", 0.5, True),
        "3.5.0": (1, "selective", 0.5, False), "3.5.1": (1, "selective", 0, True),
        "3.8.0": (0, "selective", 0, True),
    }  # fmt: skip
    without = run("ms-swift", task="dpo", sft_alpha=0, versions={"ms-swift": "3.4.1"}).keeps.roles[0].path
    assert (without.kind, without.nll) == ("log-softmax", 0)


def test_ms_swift_compares_distributions_in_turn() -> None:
    """3.12 and 4.6 `rlhf_trainers/gkd_loss.py`: 512 tokens at once; 3.8 has TRL's loss; `sft_alpha`."""
    assert [run("ms-swift", task="gkd", sft_alpha=a).keeps.roles[0].path.nll for a in (0, 0.1)] == [0, 1]
    new = run("ms-swift", task="gkd", micro_batch=2, seq_len=2048).keeps.roles[0].path
    assert (new.kind, new.tile, new.turns) == ("divergence", 512, 8)
    old = run("ms-swift", task="gkd", versions={"ms-swift": "3.9.0"}).keeps.roles[0].path
    assert (old.kind, old.tile) == ("divergence", 0)


def test_distributions_of_answers_alone_are_compared() -> None:
    """Sequences of 1,000 tokens of which a prompt has 600: 400 of each row, of 2 rows 800, in turns of 512."""
    said = {"mean": 1000, "longest": 1000}
    fields: dict[str, Any] = {"task": "gkd", "micro_batch": 2, "seq_len": 2048}
    whole, answers = (run("ms-swift", **fields, lengths=said | own) for own in ({}, {"prompt": 600}))
    student, _ = (role.path for role in whole.keeps.roles)
    assert (student.kept, student.picked, student.turns) == (0.999, False, 4)
    student, teacher = (role.path for role in answers.keeps.roles)
    assert (student.kept, student.picked, student.turns, student.copied) == (0.4, True, 2, False)
    assert (teacher.kept, teacher.picked) == (0.4, True)
    old = {"versions": {"ms-swift": "3.9.0"}}
    assert run("ms-swift", **fields, lengths=said, **old).keeps.roles[0].path.copied
    # a model that sees makes all logits, until Transformers 5
    seen = {"model": "qwen2.5-vl-3b", "images": {"width": 280, "height": 280}, "attention": "flash"}
    for transformers, picked in (("4.57", False), ("5.2", True)):
        s = run("ms-swift", **fields, **seen, lengths=said | {"prompt": 600}, versions={"transformers": transformers})
        assert (s.keeps.roles[0].path.kept, s.keeps.roles[0].path.picked) == (0.4, picked)
    with pytest.raises(ScenarioError, match=r"lengths\.prompt: given 1000, allowed: less than the mean of 1000 tokens"):
        run("ms-swift", **fields, lengths=said | {"prompt": 1000})


@pytest.mark.parametrize("trainer", TRAINERS)
def test_what_is_said_goes_before_a_habit(trainer: str) -> None:
    """A setting that the user names is never overwritten."""
    method = {"method": "lora" if trainer == "litgpt" else "full"}
    said = {"micro_batch": 3, "global_batch": 9, "seq_len": 777, "checkpointing": "none", "expandable_segments": False}
    s = run(trainer, **said, **method)
    assert {name: getattr(s, name) for name in said | method} == said | method


@pytest.mark.parametrize(
    ("trainer", "fields", "kept"),
    [
        ("llamafactory", {}, True), ("llamafactory", {"gpus": 2, "sharding": "fsdp2"}, False),
        ("axolotl", {}, True), ("axolotl", {"task": "dpo"}, False),
        ("ms-swift", {}, True), ("ms-swift", {"gpus": 2}, False), ("ms-swift", {"gpus": 2, "sharding": "zero2"}, True),
        ("torchtune", {}, False), ("torchtitan", {}, False), ("unsloth", {}, True),
        # Megatron-core's `CheckpointFunction` runs the whole of `run_function` in backward (tensor_parallel/random.py)
        ("megatron", {}, True), ("megatron", {"checkpointing": "selective"}, False), ("megatron-swift", {}, True),
    ],
)  # fmt: skip
def test_which_checkpointing_is_reentrant(trainer: str, fields: dict[str, Any], kept: bool) -> None:
    assert run(trainer, **fields).reentrant is kept


@pytest.mark.parametrize(
    ("trainer", "fields", "path"),
    [
        ("torchtune", {}, Path("chunked-logits")),
        ("torchtune", {"loss": "full"}, Path("cross-entropy", head_fp32=True, outside=True)),
        # before 0.3.0 a copy without the last position, which stays a variable
        ("torchtune", {"loss": "full", "versions__torchtune": "0.2"},
         Path("cross-entropy", head_fp32=True, outside=True, shift_copy=True, held="step")),
        ("torchtune", {"task": "dpo", "seq_len": 512},
         Path("log-softmax", head_fp32=True, scaled="copy", kept=511 / 512)),
        ("torchtitan", {}, Path("ahead", summed=4, copied=True)),
        ("torchtitan", {"versions__torchtitan": "0.1"}, Path("cross-entropy", outside=True)),
        (
            "torchtitan", {"versions__torchtitan": "0.0.2"},
            Path("cross-entropy", outside=True, head_fp32=True, held="backward"),
        ),
        ("unsloth", {}, Path("fused", chunks="rows")),
        # older releases: a kernel that writes over the logits, then cut-cross-entropy, then chunks as large as there is
        # room for; in between few tokens took the kernel's way. Accelerate casts the logits that a model returns
        ("unsloth", {"versions__unsloth": "2024.8"}, Path("flash", in_place=True, caps=True, metrics=4)),
        ("unsloth", {"versions__unsloth": "2024.11.10"}, Path("cut")),
        ("unsloth", {"versions__unsloth": "2025.3.19", "micro_batch": 1, "seq_len": 1025}, Path("cut")),
        ("unsloth", {"versions__unsloth": "2025.3.19", "micro_batch": 1, "seq_len": 1024},
         Path("flash", in_place=True, caps=True, metrics=4)),
        ("unsloth", {"versions__unsloth": "2025.9.1"}, Path("fused", chunks="nearest")),
        ("unsloth", {"versions__unsloth": "2026.6.9"}, Path("fused", chunks="nearest")),
        ("unsloth", {"versions__unsloth": "2026.7.1"}, Path("fused", chunks="capped")),
        ("unsloth", {"versions__unsloth": "2026.9.4"}, Path("fused", chunks="chain")),
        # Granite 4's forward casts its logits, so that before 2026.5.2 no pattern found its loss
        ("unsloth", {"model": "granite-4-350m", "versions__unsloth": "2025.10.11"},
         Path("flash", head_fp32=True, in_place=True)),
        ("unsloth", {"model": "granite-4-350m", "versions__unsloth": "2026.5.2"}, Path("fused", chunks="nearest")),
        # fp32 logits under Accelerate's autocast, of which TRL takes the logsumexp row by row; none under DeepSpeed
        ("ms-swift", {"task": "dpo", "seq_len": 512}, Path("rows", head_fp32=True, kept=511 / 512)),
        ("axolotl", {"loss": "chunked"}, Path("chunked-views", outputs_fp32=True)),
        ("axolotl", {"loss": "chunked", "gpus": 2, "sharding": "zero2"}, Path("chunked-views")),
        ("axolotl", {"task": "dpo", "seq_len": 512, "gpus": 2, "sharding": "zero2"}, Path("selective", kept=511 / 512)),
        ("llamafactory", {"task": "dpo", "seq_len": 512},
         Path("log-softmax", head_fp32=True, upcast=True, kept=511 / 512, held="inside")),
        ("ms-swift", {"task": "rm"}, Path("scalar")),
    ],
)  # fmt: skip
def test_the_way_to_a_loss(trainer: str, fields: dict[str, Any], path: Path) -> None:
    assert run(trainer, **fields).keeps.roles[0].path == path


@pytest.mark.parametrize(
    ("trainer", "fields", "ends"),
    [
        ("torchtitan", {}, "kept"),
        ("torchtitan", {"versions__torchtitan": "0.1"}, ""),  # embedding and head in the root
        ("torchtitan", {"model": "qwen3-4b"}, ""),  # one tensor is both
        ("torchtitan", {"gpus": 2, "pipeline_parallel": 2, "model": "llama-3-8b"}, ""),
        ("torchtune", {"gpus": 2}, "freed"),
        ("torchtune", {"gpus": 2, "method": "lora"}, ""),
    ],
)
def test_which_trainers_make_units_of_the_embedding_and_the_head(
    trainer: str, fields: dict[str, Any], ends: str
) -> None:
    """torchtitan 0.2.2 `models/llama3/infra/parallelize.py`; torchtune 0.6.1 `recipes/configs/llama3_1/*.yaml`."""
    assert run(trainer, **fields).keeps.roles[0].ends == ends


@pytest.mark.parametrize(
    ("model", "versions", "norm", "rotation", "tables"),
    [
        ("llama-3-8b", {"torchtitan": "0.2.2", "torch": "2.11"}, "kernel", "complex", 0),
        ("llama-3-8b", {"torchtitan": "0.1", "torch": "2.8"}, "rms", "complex", 0),
        ("qwen3-8b", {"torchtitan": "0.2.2", "torch": "2.12"}, "kernel-listed", "", 2 * 128),
        ("qwen3-8b", {"torchtitan": "0.3", "torch": "2.13"}, "kernel-listed", "fp32", 0),
        ("mistral-7b", {"torchtitan": "0.3", "torch": "2.13"}, "rms", "", 0),  # its code has no Mistral
    ],
)
def test_torchtitans_own_layers(model: str, versions: dict[str, str], norm: str, rotation: str, tables: int) -> None:
    """`models/llama3/model/model.py`, `models/qwen3/model/model.py` of 0.2.2; `models/common/rope.py` of 0.3.0."""
    arch = run("torchtitan", model=model, **{f"versions__{k}": v for k, v in versions.items()}).architecture
    assert (arch.norm, arch.rotation, arch.rotary_tables) == (norm, rotation, tables)


@pytest.mark.parametrize(
    ("trainer", "fields", "note"),
    [
        ("axolotl", {"versions__axolotl": "0.12"}, "axolotl 0.12 is computed as 0.19.0, the nearest release"),
        ("axolotl", {"method": "lora"}, "lora_mlp_kernel"),
        ("ms-swift", {}, "use_logits_to_keep"),
        ("torchtitan", {}, "compile.enable"),
        ("torchtitan", {}, "training.disable_cuda_graphs"),
        ("torchtitan", {}, "disable_cuda_graphs"),
        ("llamafactory", {"loss": "fused", "model": "qwen3-30b-a3b"}, "Liger's kernel for routed experts"),
    ],
)
def test_what_no_field_says_is_a_note_of_the_estimate(trainer: str, fields: dict[str, Any], note: str) -> None:
    assert any(note in line for line in estimate(run(trainer, **fields)).notes)


def test_a_release_that_was_read_has_no_note() -> None:
    for asked in ("0.9.1", "0.9", "0.9.5"):
        notes = estimate(run("llamafactory", versions__llamafactory=asked)).notes
        assert not any("computed as" in note for note in notes)


@pytest.mark.parametrize(
    ("trainer", "fields", "message"),
    [
        ("unsloth", {"task": "grpo"}, "trainer: given 'unsloth' for grpo, allowed: own; modelled for pretrain, sft"),
        ("ms-swift", {"gpus": 2, "tensor_parallel": 2},
         "trainer: given 'ms-swift' where GPUs share sequences, allowed: own; not modelled"),
        ("torchtitan", {"method": "lora"}, "method: given 'lora' with trainer torchtitan, allowed: full"),
        ("torchtune", {"gpus": 2, "sharding": "ddp"},
         "sharding: given 'ddp' with trainer torchtune, allowed: none, fsdp2"),
        ("torchtune", {"method": "lora", "lora__dtype": "fp32"},
         "lora.dtype: given 'fp32' with trainer torchtune, allowed: bf16, as the model"),
        ("torchtune", {"model": "qwen2.5-vl-3b", "images": {"width": 448, "height": 448}},
         "images: given '448 x 448' with trainer torchtune, allowed: none"),
        ("axolotl", {"loss": "vocab-chunked"},
         "loss: given 'vocab-chunked' with trainer axolotl, allowed: full, chunked, fused, cut"),
        ("unsloth", {"gpus": 2, "sharding": "fsdp2"},
         "sharding: given 'fsdp2' with trainer unsloth, allowed: none, ddp"),
        ("ms-swift", {"framework": "verl"}, "trainer: given 'ms-swift', allowed with verl: own"),
        ("axolotl", {"framework": "openrlhf"}, "trainer: given 'axolotl', allowed with openrlhf: own"),
        ("unsloth", {"framework": "trl"}, "trainer: given 'unsloth', allowed with trl: transformers"),
    ],
)  # fmt: skip
def test_what_a_trainer_cannot_run_is_refused_in_one_line(trainer: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        run(trainer, **fields)
    assert str(refused.value) == f"scenario: {message}"


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("model", ["llama-3-8b", "gemma-2-9b", "qwen3-30b-a3b"])
def test_a_task_that_a_trainer_does_not_run_is_refused_in_one_line(trainer: str, model: str) -> None:
    """Its habits are not known there, and nothing that reads them comes before the refusal."""
    for task in set(RL) - ({"grpo"} if trainer in REINFORCES else set()):
        with pytest.raises(ScenarioError, match=r"^scenario: trainer: given "):
            run(trainer, model=model, task=task)


@pytest.mark.parametrize(
    ("given", "trainer", "version"),
    [
        ("ms-swift", "ms-swift", None),
        ("ms-swift==4.6", "ms-swift", "4.6"),
        ("LLaMA-Factory", "llamafactory", None),
        ("axolotl", "axolotl", None),
        ("torch_tune", "torchtune", None),
        ("Unsloth", "unsloth", None),
        ("transformers==4.57", "transformers", "4.57"),
    ],
)
def test_a_trainer_that_is_given_as_a_framework_is_torch_with_that_trainer(
    given: str, trainer: str, version: str | None
) -> None:
    spelled = {"framework": "torch", "trainer": trainer} | ({f"versions.{trainer}": version} if version else {})
    assert job(framework=given) == job(**spelled)


def test_a_trainer_misspelt_as_a_framework_is_put_forward() -> None:
    with pytest.raises(ScenarioError, match="did you mean 'unsloth'"):
        job(framework="unslot")


def test_a_framework_in_another_spelling_is_that_framework() -> None:
    assert job(framework="OpenRLHF==0.6") == job(framework="openrlhf==0.6")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"trainer": "axolotl"}, "trainer: given 'axolotl', allowed: ms-swift, which framework names"),
        ({"versions": {"ms-swift": "3.8"}}, "versions.ms-swift: given '3.8', allowed: 4.6, which framework names"),
    ],
)
def test_what_contradicts_a_trainer_that_is_given_as_a_framework_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ScenarioError) as refused:
        job(framework="ms-swift==4.6", **fields)
    assert str(refused.value) == f"scenario: {message}"


def test_llamafactorys_dpo_keeps_the_policys_logits_while_the_reference_runs() -> None:
    """In fp32, for its metrics, a slice without the last position, which keeps all, beside the log-softmax."""

    def waiting(trainer: str) -> int:
        s = run(trainer, task="dpo", seq_len=512, micro_batch=1, logprob="log-softmax-fp32", precision="bf16")
        (group,) = estimate(s).groups
        (forward,) = (phase for phase in group.phases if phase.name == "forward")
        return sum(x.bytes for x in forward.moment.lines if x.source == "loss#held")

    assert waiting("llamafactory") == 4 * 2 * 512 * 128_256
    assert waiting("axolotl") == 0


@pytest.mark.parametrize(
    ("model", "fields", "expected"),
    [
        ("llama-3.1-8b", {}, "freed"),
        ("qwen2.5-7b", {}, ""),
        ("llama-3.1-8b", {"method": "lora"}, ""),
        ("llama-3.1-70b", {"method": "lora"}, "freed"),
        ("llama-3.1-70b", {"method": "lora", "versions": {"torchtune": "0.4.0"}}, ""),
    ],
)
def test_torchtunes_configurations_say_which_models_have_units_at_their_ends(
    model: str, fields: dict[str, Any], expected: str
) -> None:
    """`custom_sharded_layers` stands in some of its configurations alone."""
    job = {"model": model, "task": "sft", "framework": "torch", "trainer": "torchtune", "gpu": "h100-sxm", "gpus": 8}
    assert torchtune.keeps(parse({**job, **fields}))["ends"] == expected


@pytest.mark.parametrize(("version", "sharding"), [("0.2.1", "fsdp1"), ("0.3.0", "fsdp2")])
def test_torchtunes_recipes_were_wrapped_by_fsdp_1_before_0_3(version: str, sharding: str) -> None:
    """recipes/lora_finetune_distributed.py: `FSDP(model, lora_fsdp_wrap_policy(...))` in 0.2.1, `shard_model` since."""
    job = {"model": "llama-3-8b", "task": "sft", "framework": "torch", "trainer": "torchtune", "gpu": "a100-80-sxm"}
    several = {**job, "gpus": 2, "method": "lora", "versions": {"torchtune": version}}
    s = parse(several)
    assert s.sharding == sharding and s.lora and s.lora.units == "own"
    with pytest.raises(ScenarioError, match=f"allowed: none, {sharding}$"):
        parse({**several, "sharding": "fsdp1" if sharding == "fsdp2" else "fsdp2"})


@pytest.mark.parametrize(
    ("trainer", "sharding", "bucket", "persistent", "overlaps"),
    [
        ("ms-swift", "zero2", 200_000_000, 100_000, False),
        ("ms-swift", "zero3", 4096 * 4096, 10 * 4096, False),
        ("llamafactory", "zero2", 500_000_000, 100_000, False),
        ("llamafactory", "zero3", 4096 * 4096, 10 * 4096, False),
        ("axolotl", "zero2", 500_000_000, 100_000, True),
        ("axolotl", "zero3", 4096 * 4096, 10 * 4096, True),
        ("transformers", "zero3", 500_000_000, 100_000, None),
    ],
)
def test_deepspeed_has_the_sizes_of_the_file_that_a_trainer_ships(
    trainer: str, sharding: str, bucket: int, persistent: int, overlaps: bool | None
) -> None:
    """Where these files say `auto`, Transformers' Trainer fills in the width of the model, here 4096."""
    own = {"model": "llama-3-8b", "task": "sft", "framework": "torch", "gpu": "h100-sxm", "gpus": 8}
    config = parse({**own, "trainer": trainer, "sharding": sharding}).keeps.deepspeed
    assert config
    assert (config.reduce_bucket, config.persistence_threshold, config.overlap_comm) == (bucket, persistent, overlaps)


def test_ms_swift_had_zero_exchange_in_streams_of_its_own_until_march_2025() -> None:
    """llm/ds_config/zero3.json of 3.2.1 says `overlap_comm: true`, that of 3.2.2 false."""

    def overlaps(version: str, sharding: str) -> bool | None:
        config = run("ms-swift", gpus=2, sharding=sharding, **{"versions__ms-swift": version}).keeps.deepspeed
        return config and config.overlap_comm

    assert [overlaps(v, z) for v in ("3.2.1", "3.2.2") for z in ("zero2", "zero3")] == [True, True, False, False]


def test_unsloth_loads_a_copy_whose_linears_are_not_all_in_four_bits() -> None:
    """From the release that maps the model's name to it, and unless the scenario says another size."""
    llama = {"model": "llama-3.1-8b", "method": "qlora"}
    sizes = [
        run("unsloth", **llama, versions__unsloth=at).checkpoint_gb for at in ("2025.2.2", "2025.3.8", "2026.10.9")
    ]
    assert sizes == [None, 5.964, 5.964]
    assert run("unsloth", **llama, checkpoint_gb=5.703).checkpoint_gb == 5.703
    others = ({"method": "lora"}, {"model": "qwen2.5-7b"}, {"trainer": "axolotl"})
    assert [run(**{"trainer": "unsloth"} | llama | other).checkpoint_gb for other in others] == [None] * 3


def test_unsloth_makes_segments_expandable_since_march_2024() -> None:
    mapped = [run("unsloth", versions__unsloth=at).expandable_segments for at in ("2024.1", "2024.3", "2026.10.9")]
    assert mapped == [False, True, True]


@pytest.mark.parametrize(
    ("fields", "forced"),
    [
        # FORCE_FLOAT32 has "gemma3" since 2025.3.15; norms return fp16 since unsloth_zoo 2025.6.3, which 2025.6.4 asks
        # for; sdpa_gqa.py came with 2026.10.8
        ({"versions__unsloth": "2025.3.14"}, ""),
        ({"versions__unsloth": "2025.3.15"}, "norms"),
        ({"versions__unsloth": "2025.6.3"}, "norms"),
        ({"versions__unsloth": "2025.6.4"}, "grouped"),
        ({"versions__unsloth": "2026.10.7"}, "grouped"),
        ({"versions__unsloth": "2026.10.8", "images": {"width": 320, "height": 64}}, "repeated"),
        ({"precision": "bf16"}, ""),
        ({"model": "gemma-2-2b"}, ""),
    ],
)
def test_unsloth_computes_gemma_3_in_fp32_where_fp16_is_asked_for(fields: dict[str, Any], forced: str) -> None:
    """Without the autocast that Accelerate puts around other models."""
    given = {"model": "gemma-3-4b", "method": "qlora", "precision": "fp16", "versions__transformers": "4.55", **fields}
    role = run("unsloth", **given).keeps.roles[0]
    assert role.forced == forced
    assert role.wrapped == (not forced)


def test_unsloth_casts_gemma_3s_table_on_the_card_unless_it_is_large_and_the_release_new() -> None:
    """262,144 times 640 elements of Gemma 3 270M and 262,208 times 2,560 of Gemma 3 4B, a GiB in two bytes and more.

    unsloth_zoo 2026.10.9 patching_utils.py: `_FORCED_FLOAT32_STAGE_BYTES`.
    """

    def cast(model: str, version: str) -> int:
        s = run("unsloth", model=model, method="lora", precision="fp16", versions__unsloth=version)
        moments = dict(engine(s, replica(s, s.keeps.roles[0], trained=True), s.keeps).loading())
        lines = moments.get("table: cast on the GPU", [])
        return lines[-1].bytes if lines else 0

    assert cast("gemma-3-270m", "2025.9.1") == cast("gemma-3-270m", "2026.10.8") == 2 * 262_144 * 640
    assert cast("gemma-3-4b", "2025.9.1") == 2 * 262_208 * 2560 > 2**30
    assert cast("gemma-3-4b", "2026.10.8") == 0


def test_unsloth_makes_chunks_of_a_gib_of_logits_where_a_new_pytorch_switches_cut_cross_entropy_off() -> None:
    """unsloth 2025.8.9 __init__.py:112."""

    def way(version: str, torch: str) -> Path:
        return run("unsloth", versions__unsloth=version, versions__torch=torch).keeps.roles[0].path

    assert way("2025.8.9", "2.8") == Path("fused", chunks="gib")
    assert way("2025.8.9", "2.7") == way("2025.8.8", "2.8") == Path("cut")


def test_unsloth_runs_copies_of_phi_whose_projections_are_apart() -> None:
    own, published = run("unsloth", model="phi-3-mini").architecture, run("own", model="phi-3-mini").architecture
    assert adaptable_names(own) == adaptable_names(run("own", model="llama-2-7b").architecture)
    assert adaptable_names(published) == ["down_proj", "gate_up_proj", "o_proj", "qkv_proj"]
    assert parameters(own) == parameters(published)


def test_a_batch_without_padding_has_the_tokens_of_its_sequences() -> None:
    """Of eight sequences of 300 tokens on average and 1,800 at most, padded ones are all as long as the longest."""
    real = {"micro_batch": 8, "lengths": {"mean": 300, "longest": 1800}, "attention": "flash"}
    padded, free = (run("ms-swift", padding_free=on, **real) for on in (False, True))
    assert padded.held_len(8) == 1800
    assert 300 < free.held_len(8) == run("ms-swift", packing=True, **real).held_len(8) < 900
    assert run("megatron-swift", micro_batch=8, lengths=real["lengths"]).held_len(8) == free.held_len(8)
    with pytest.raises(ScenarioError, match="padding_free: given true with attention 'sdpa', allowed"):
        run("ms-swift", padding_free=True)
    with pytest.raises(ScenarioError, match="padding_free: given true, allowed"):
        run("own", padding_free=True)


def test_unsloth_pads_no_batches_from_a_release_on_but_of_some_models() -> None:
    """Eight sequences of 300 tokens on average and 2,000 at most, padded: 16,000; others hold what sequences have."""
    real = {"micro_batch": 8, "lengths": {"mean": 300, "longest": 2000}}

    def held(version: str, model: str = "llama-3.1-8b", **fields: Any) -> int:
        s = run("unsloth", versions__unsloth=version, model=model, method="qlora", **real, **fields)
        return s.held_len(s.rows) * s.rows

    assert held("2025.8.9") == held("2025.12.1") == held("2026.1.2", padding_free=False) == 16_000
    assert 2_400 < held("2025.12.4") == held("2026.10.9") == held("2025.8.9", padding_free=True) < 9_000
    for model in ("gpt-oss-20b", "gemma-2-9b"):
        assert held("2026.1.2", model) == held("2026.10.9", model) == 16_000
    # what can read images is padded at first, later with images alone
    for model in ("gemma-3-4b", "gemma-4-e4b", "gemma-3n-e4b"):
        new = {"versions__transformers": "5.10.1"}
        assert held("2026.7.3", model, **new) == 16_000 > held("2026.7.4", model, **new)
    images = {"width": 320, "height": 64}
    assert held("2026.7.4", "gemma-3-4b", images=images) == 16_000
    # states that pass through positions
    assert held("2026.7.4", "granite-4-h-micro", linear_attention="torch") == 16_000
    assert held("2026.7.4", "granite-4-h-micro") == held("2026.7.3", "granite-4-h-micro") < 9_000
    for field in ("padding_free", "packing"):
        with pytest.raises(
            ScenarioError, match=f"{field}: given true, allowed with trainer unsloth: false; batches of"
        ):
            held("2026.1.2", "gpt-oss-20b", **{field: True})


def test_an_embeddings_rows_are_a_leaf_where_checkpointing_is_on_before_adapters_are_there() -> None:
    """Transformers from 5 on hooks the embedding as checkpointing is switched on: PEFT's by then under its Trainer."""

    def hooked(trainer: str, **fields: Any) -> bool:
        lora = {"rank": 8, "targets": ["q_proj", "embed_tokens"]}
        return engine_of(run(trainer, lora=lora, **{"method": "lora"} | fields)).replica.run.hooked

    assert hooked("own") and hooked("axolotl") and not hooked("transformers") and not hooked("llamafactory")
    older = {"versions": {"transformers": "4.57"}}
    assert not hooked("own", **older) and hooked("own", method="qlora", **older)


def test_unsloths_fastmodel_has_adapters_at_the_ends_that_it_does_not_train() -> None:
    """LFM2 1.2B, 65,536 tokens of 2,048, rank 8: 8 · 67,584 elements of four bytes beside embedding and head each.

    unsloth_zoo 2026.1.2 freezes `lora_embedding_A` (training_utils.py:133), and its fused loss reads the head's own
    weight (compiler.py:1068); all logits are made by the head with its adapter, where the loss is full.
    """
    lora, version = {"rank": 8, "targets": ["q_proj"]}, {"unsloth": "2026.1.2"}

    def held(*ends: str, **fields: Any) -> tuple[int, ...]:
        own = {**lora, "targets": ["q_proj", *ends]}
        (group,) = estimate(
            run("unsloth", model="lfm2-1.2b", method="lora", lora=own, versions=version, **fields)
        ).groups
        lines = next(p.moment.lines for p in group.phases if p.name == "step")
        components = ("adapter", "gradients", "optimizer_states")
        return tuple(sum(x.bytes for x in lines if x.component == name) for name in components)

    plain, one = held(), 4 * 8 * (65_536 + 2048)
    assert held("embed_tokens", "lm_head") == (plain[0] + 2 * one, *plain[1:])
    full = held(loss="full")
    assert held("embed_tokens", loss="full") == (full[0] + one, *full[1:])
    assert held("lm_head", loss="full")[:2] == (full[0] + one, full[1] + one)


def test_what_is_trained_at_the_ends_is_refused_where_it_is_not_modelled() -> None:
    named = {"rank": 8, "targets": ["q_proj", "lm_head"]}
    assert run("torchtune", method="lora", lora=named, loss="full").lora
    rows = {"rank": 8, "targets": ["q_proj", "embed_tokens"]}
    saved = {"rank": 8, "modules_to_save": ["lm_head"]}
    for trainer, fields, words in (
        ("torchtune", {"lora": named}, "lora.targets: given lm_head with loss chunked"),
        ("own", {"lora": named, "gpus": 2, "sharding": "fsdp2"}, "lora.targets: given lm_head with sharding fsdp2"),
        ("torchtune", {"lora": rows, "loss": "full"}, "lora.targets: given embed_tokens with trainer torchtune"),
        ("own", {"lora": rows, "gpus": 2, "sharding": "zero3"}, "lora.targets: given embed_tokens with sharding zero3"),
        ("own", {"lora": rows, "gpus": 2, "tensor_parallel": 2}, "given embed_tokens where GPUs share sequences"),
        ("own", {"lora": {**rows, **saved}}, "lora.targets: given embed_tokens with lora.modules_to_save lm_head"),
        ("unsloth", {"lora": rows}, "given embed_tokens with trainer unsloth, allowed: lora.modules_to_save embed_tok"),
        (
            "unsloth",
            {"model": "lfm2-1.2b", "lora": {"rank": 8, "targets": ["embed_tokens", "lm_head"]}},
            "given embed_tokens, lm_head with trainer unsloth, allowed: linears of layers, too",
        ),
        ("own", {"lora": {**rows, "dora": True}}, "lora.dora: given true with lora.targets embed_tokens"),
        ("own", {"lora": {**rows, "count": 4}}, "lora.count: given 4 with lora.targets embed_tokens"),
        ("own", {"lora": {**named, **saved}}, "lora.targets: given lm_head with lora.modules_to_save lm_head"),
        (
            "ms-swift",
            {"lora": saved, "gpus": 2, "sharding": "fsdp2"},
            "lora.modules_to_save: given .lm_head. with shard",
        ),
        (
            "llamafactory",
            {"lora": {"modules_to_save": ["all-norm"]}},
            "lora.modules_to_save: given all-norm with trainer llamafactory",
        ),
        ("torchtune", {"lora": {"init": "olora"}}, "lora.init: given 'olora' with trainer torchtune"),
        ("torchtune", {"lora": {"dora": True}}, "lora.dora: given true with trainer torchtune"),
        ("unsloth", {"lora": {"dora": True}}, "lora.dora: given true with trainer unsloth"),
        ("llamafactory", {"lora": {"dora": True}, "sharding": "zero3", "gpus": 2}, "true with sharding zero3"),
        ("own", {"lora": {"dora": True}, "sharding": "fsdp2", "gpus": 2}, "true with sharding fsdp2"),
        ("own", {"lora": {"dora": True, "units": "layer"}, "sharding": "fsdp1", "gpus": 2}, "true with lora.units"),
        ("torchtune", {"lora": {"count": 4}}, "lora.count: given 4 with trainer torchtune"),
        ("own", {"lora": {"count": 4}, "sharding": "zero2", "gpus": 2}, "lora.count: given 4 with sharding zero2"),
        ("own", {"lora": {"count": 4, "dora": True}}, "lora.count: given 4 with lora.dora"),
        ("own", {"lora": {"count": 4}, "precision": "autocast"}, "lora.count: given 4 with precision autocast"),
        ("torchtune", {"lora": saved}, "lora.modules_to_save: given .lm_head. with trainer torchtune"),
    ):
        with pytest.raises(ScenarioError, match=words):
            run(trainer, method="lora", **fields)


@pytest.mark.parametrize(
    ("scenario", "elements"),
    [
        # Llama 3 8B's largest linear has 14,336 · 4,096 elements
        ({}, 14_336 * 4096),
        ({"versions__unsloth": "2025.1.8"}, 0),
        ({"method": "lora"}, 0),
        # PEFT's layers run where an adapter drops out, or lies beside some of the MLP's linears alone
        ({"lora__dropout": 0.1}, 0),
        ({"lora__targets": ["gate_proj", "up_proj", "o_proj"]}, 4096 * 4096),
        # Qwen2's q, k and v have biases, which `apply_lora_qkv` does not take
        ({"model": "qwen2.5-7b", "lora__targets": ["q_proj", "k_proj", "v_proj"]}, 0),
        # Phi-4 runs as Llama does, its gate and up apart
        ({"model": "phi-4"}, 17_920 * 5120),
        # its own code has no Gemma 3
        ({"model": "gemma-3-27b", "versions__unsloth": "2025.9.1"}, 0),
    ],
)
def test_unsloth_dequantises_into_a_buffer_as_large_as_the_largest_weight_of_its_own_functions(
    scenario: dict[str, Any], elements: int
) -> None:
    found = job(**{"trainer": "unsloth", "method": "qlora", "versions__unsloth": "2025.2.2"} | scenario)
    assert found.keeps.roles[0].buffer == elements


def test_gpus_that_share_sequences_under_ms_swift_have_a_loss_of_their_own_tokens() -> None:
    """trainers/utils.py:167 of 4.6.0; Accelerate's autocast makes fp32 of the logits, DeepSpeed does not."""
    job = {"gpus": 8, "context_parallel": 8, "attention": "flash", "padding_free": True}

    def role(**fields: Any) -> Any:
        return run("ms-swift", **job, **fields).keeps.roles[0]

    assert role().exchange == "zigzag"
    assert role().path == Path("cross-entropy", head_fp32=True, uncast=True, outside=True)
    tiles = Path("flash", in_place=True, tile=2048)
    assert role(loss="chunked", loss_chunk_size=2048, sharding="zero3").path == tiles
    # 16 sequences over all GPUs, of which two groups of four have a batch each (trainers/arguments.py:290)
    assert run("ms-swift", **{**job, "context_parallel": 4}).global_batch == 2 * 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "dpo"}, "context_parallel: given 8 for dpo, allowed: 1, or for pretrain and sft; not modelled"),
        ({"attention": "sdpa", "padding_free": False}, "attention: given 'sdpa' with context_parallel = 8"),
        ({"padding_free": False}, "padding_free: given false with context_parallel = 8, allowed: true, or packing"),
        ({"loss": "chunked"}, "loss_chunk_size: given null, allowed: a number with loss chunked"),
        ({"loss": "fused"}, "loss: given 'fused' with trainer ms-swift, allowed: full, chunked"),
        ({"model": "gpt-oss-20b"}, "context_parallel: given 8, allowed for gpt_oss: 1; not modelled"),
        ({"model": "qwen3-next-80b-a3b"}, "context_parallel: given 8, allowed for qwen3_next: 1; not modelled"),
        (
            {"model": "qwen3.5-4b"},
            "context_parallel: given 8, allowed for qwen3_5_text: a divisor of 4, heads of every",
        ),
        ({"context_parallel": 4, "tensor_parallel": 2}, "trainer: given 'ms-swift' where GPUs share sequences"),
    ],
)
def test_ms_swift_refuses_what_its_gpus_cannot_share(fields: dict[str, Any], message: str) -> None:
    job = {"gpus": 8, "context_parallel": 8, "attention": "flash", "padding_free": True}
    with pytest.raises(ScenarioError, match=re.escape(message)):
        run("ms-swift", **{**job, **fields})


@pytest.mark.parametrize(
    ("scenario", "elements"),
    [
        # SigLIP's 27 layers: four linears of 1152 · 1152, and two of 1152 · 4304
        ({}, 27 * (4 * 1152 * 1152 + 2 * 1152 * 4304)),
        ({"versions__unsloth": "2026.1.1"}, 0),
        ({"vision_tower": False}, 0),
        ({"method": "lora"}, 0),
        ({"model": "qwen2.5-vl-7b"}, 0),  # whose tower is called visual
    ],
)
def test_unsloth_leaves_a_vision_tower_in_sixteen_bits(scenario: dict[str, Any], elements: int) -> None:
    """Its linears take 2 bytes an element beside a base in NF4."""
    known = {"trainer": "unsloth", "model": "gemma-3-12b", "method": "qlora", "vision_tower": True}
    found = job(**known | {"versions__unsloth": "2026.2.1"} | scenario)
    assert found.keeps.roles[0].wide == elements
