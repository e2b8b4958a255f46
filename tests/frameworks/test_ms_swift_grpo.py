"""ms-swift's loop of GRPO, held against its code in the packages 3.5.0 to 4.6.0 and against counts by hand."""

from __future__ import annotations

from typing import Any

import pytest

from calc.base.plan import Path
from calc.estimate.estimate import estimate, speed
from calc.estimate.result import Estimate
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario, ScenarioError

VLLM = {"engine": "vllm", "sleep": True, "gpu_memory_utilization": 0.4}
AWAY = {**VLLM, "offload_model": True, "offload_optimizer": True}
# Qwen3 8B: q and o of 4096 x 4096, k and v of 4096 x 1024, three of 4096 x 12288, four norms
LAYER = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
OUTER = 2 * 151936 * 4096 + 4096  # embedding, head and final norm
P = 36 * LAYER + OUTER


def job(version: str = "4.6.0", **fields: Any) -> Scenario:
    """GRPO of Qwen3 8B by ms-swift in some release."""
    base = {
        "model": "qwen3-8b", "task": "grpo", "framework": "torch", "trainer": "ms-swift", "gpu": "h100-sxm",
        "prompt_len": 1024, "response_len": 3072, "versions": {"ms-swift": version},
    }  # fmt: skip
    return parse(base | fields)


def lines(found: Estimate, phase: str) -> dict[tuple[str, str], int]:
    """The bytes at a phase's peak by role and component."""
    told: dict[tuple[str, str], int] = {}
    for line in next(p for p in found.groups[0].phases if p.name == phase).moment.lines:
        told[line.role, line.component] = told.get((line.role, line.component), 0) + line.bytes
    return told


def test_the_defaults_are_those_of_swift_rlhf() -> None:
    """A step has at least 16 completions, of which each prompt has eight; a policy has a reference (beta 0.04)."""
    s = job(gpus=8, sharding="zero3")
    assert s.rollout
    assert (s.micro_batch, s.global_batch, s.rollout.n, s.rollout.batch) == (1, 16, 8, 2)
    assert (s.rollout.engine, s.rollout.sleep, s.checkpointing, s.has("reference")) == ("hf", False, "full", True)
    assert job(gpus=8, rollout={"n": 6}, sharding="zero3").global_batch == 24
    apart = {"placement": "separate", "rollout": {"engine": "vllm", "gpus": 2}}
    assert job(gpus=6, **apart, sharding="zero3").global_batch == 16  # four GPUs train


@pytest.mark.parametrize(
    ("version", "fields", "path"),
    [
        # autocast makes logits fp32: logsumexp row by row (trl `selective_log_softmax`); TRL's forward copies them
        ("3.9.0", {}, Path("rows", head_fp32=True, kept=0.75, picked=True, scaled="copy")),
        ("4.2.0", {}, Path("rows", head_fp32=True, kept=0.75, picked=True, scaled="copy")),
        # `logits.div_` of its own forward, the only one since 4.4.0
        ("4.6.0", {}, Path("rows", head_fp32=True, kept=0.75, picked=True, scaled="view")),
        # no autocast under DeepSpeed: log-softmax of each row in bf16
        ("3.9.0", {"gpus": 8, "sharding": "zero3"}, Path("selective", kept=0.75, picked=True, scaled="copy")),
    ],
)
def test_logits_of_responses_alone_are_divided_by_a_temperature(
    version: str, fields: dict[str, Any], path: Path
) -> None:
    assert job(version, **fields).keeps.role("actor").path == path


@pytest.mark.parametrize(
    ("version", "transformers", "picked", "scaled"),
    [
        ("3.5.3", "4.57", False, "copy"), ("3.7.0", "4.53", False, "copy"), ("3.7.0", "4.57", True, "copy"),
        ("4.2.0", "4.57", True, "view"),
    ],
)  # fmt: skip
def test_a_model_that_reads_images_makes_the_logits_of_prompts_unless_it_is_asked_not_to(
    version: str, transformers: str, picked: bool, scaled: str
) -> None:
    """`'logits_to_keep' in self.model_kwarg_keys` since 3.7.0; Qwen2.5-VL's forward has it since 4.55."""
    fields = {"model": "qwen2.5-vl-7b", "images.width": 640, "images.height": 480, "method": "lora"}
    s = job(version, **fields, versions={"ms-swift": version, "transformers": transformers})
    path = s.keeps.role("actor").path
    assert (path.picked, path.scaled) == (picked, scaled)


def test_a_policy_scores_responses_of_several_steps_alone() -> None:
    """`old_policy`: gradient_accumulation_steps no multiple of steps_per_generation; the reference always scores."""

    def stages(**fields: Any) -> list[tuple[str, str]]:
        s = job(gpus=8, sharding="zero3", global_batch=16, **fields)
        return [(stage.does, stage.role) for stage in s.keeps.stages]

    scored, rest = ("score", "reference"), [("train", "actor"), ("save", "actor")]
    served = [("sync", "actor"), ("serve", "rollout")]
    assert stages(rollout=VLLM) == [*served, scored, *rest]
    assert stages(rollout=VLLM | {"batch": 4}) == [*served, ("score", "actor"), scored, *rest]
    assert stages(roles={"reference": "none"}) == [("generate", "actor"), *rest]


@pytest.mark.parametrize(
    ("version", "sharding", "method", "actor", "reference"),
    [
        # rollout_mixin.py, `offload_model`: `param.data` of every parameter, and the states of the optimizer's groups
        ("3.9.0", "ddp", "full", {"weights", "adapter", "optimizer_states"}, {"weights", "adapter"}),
        ("3.9.0", "zero2", "lora", {"weights", "optimizer_states"}, {"weights"}),
        # under ZeRO-3 `param.data` is empty, and so are the groups (deepspeed 0.19.2 runtime/zero/stage3.py:1100)
        ("3.9.0", "zero3", "full", set(), set()),
        ("3.12.2", "zero3", "lora", set(), set()),
        # shards go since 3.12.3, but for those in DeepSpeed's flat buffer (stage3.py:811)
        ("3.12.3", "zero3", "full", {"optimizer_states"}, {"weights"}),
        ("4.6.0", "zero3", "lora", {"weights", "optimizer_states"}, {"weights"}),
    ],
)
def test_offload_moves_what_lies_behind_the_parameters(
    version: str, sharding: str, method: str, actor: set[str], reference: set[str]
) -> None:
    keeps = job(version, gpus=8, sharding=sharding, method=method, rollout=AWAY).keeps
    assert (set(keeps.role("actor").away), set(keeps.role("reference").away)) == (actor, reference)
    assert not job(version, gpus=8, sharding=sharding, method=method, rollout=VLLM).keeps.role("actor").away


def test_weights_and_moments_are_gone_while_vllm_generates_and_back_for_the_update() -> None:
    """DDP: 2 bytes a weight of policy and reference, and as many for each of Adam's moments."""
    here, away = (estimate(job(gpus=8, sharding="ddp", gpu="b200", rollout=r)) for r in (VLLM, AWAY))
    both = {("actor", "weights"): 2 * P, ("reference", "weights"): 2 * P, ("actor", "optimizer_states"): 4 * P}
    assert {key: size for key, size in lines(here, "rollout").items() if key in both} == both
    assert not set(both) & set(lines(away, "rollout"))
    for phase in ("sync", "backward"):  # vLLM has its new weights first
        assert lines(away, phase) == lines(here, phase)
    on_host = sum(line.bytes for line in away.host_phases[-1].moment.lines)
    assert on_host - sum(line.bytes for line in here.host_phases[-1].moment.lines) == 8 * sum(both.values())


@pytest.mark.parametrize(
    ("sharding", "moved"),
    [
        # there and back: weights of 2 bytes, two moments of as many
        ("ddp", {"actor": 2 * (2 + 2 * 2), "reference": 2 * 2}),
        # an eighth on each GPU: moments of 4 bytes, and the reference's weights
        ("zero3", {"actor": 2 * 2 * 4 / 8, "reference": 2 * 2 / 8}),
    ],
)
def test_what_waits_on_the_host_goes_there_and_comes_back(sharding: str, moved: dict[str, float]) -> None:
    terms = speed(estimate(job(gpus=8, sharding=sharding, gpu="b200", rollout=AWAY))).terms
    found = {t.name.removesuffix(": swap"): t.values["b"] for t in terms if t.name.endswith(": swap")}
    assert found == moved
    assert not [
        t for t in speed(estimate(job(gpus=8, sharding=sharding, gpu="b200", rollout=VLLM))).terms if "swap" in t.name
    ]


def test_zero3_frees_nothing_of_a_model_that_trains() -> None:
    """Before 3.12.3 nothing goes at all, and since then Adam's moments, 8 bytes a parameter over the GPUs."""
    before, old, new = (
        lines(estimate(job(version, gpus=8, sharding="zero3", rollout=r, versions={"ms-swift": version})), "rollout")
        for version, r in (("3.12.2", VLLM), ("3.12.2", AWAY), ("3.12.3", AWAY))
    )
    assert old == before
    gone = {key for key in before if key[0] in ("actor", "reference") and key not in new}
    assert gone == {("actor", "optimizer_states"), ("reference", "weights")}
    assert before["actor", "optimizer_states"] == P


def test_vllm_starts_beside_a_model_that_waits_on_the_host() -> None:
    """Since 3.6.0 it starts within `offload_context`: vLLM then finds the share of the card free that it is to use."""
    fields: dict[str, Any] = {"gpus": 8, "sharding": "ddp", "method": "lora"}
    large = {"gpu_memory_utilization": 0.9}
    assert estimate(job(**fields, rollout=VLLM | large)).verdict == "oom"
    assert estimate(job(**fields, rollout=AWAY | large)).verdict == "fits"


def test_vllm_starts_before_the_optimizer_is_built() -> None:
    """`Trainer.train` prepares it: beside vLLM are bf16 shards of policy and reference alone."""
    s = job("3.5.3", gpus=8, sharding="zero3", rollout=VLLM, versions={"ms-swift": "3.5.3", "vllm": "0.8.5"})
    there = {key: size for key, size in lines(estimate(s), "load").items() if key[0] in ("actor", "reference")}
    assert there == {("actor", "weights"): 2 * P // 8, ("reference", "weights"): 2 * P // 8}


@pytest.mark.parametrize(
    ("version", "method", "batches", "elements"),
    [
        # parameter by parameter until 3.10, of which the embedding is the largest
        ("3.9.0", "full", 2, 151936 * 4096),
        ("3.9.0", "lora", None, P),
        ("3.10.0", "full", None, P),
        # groups of 18 layers; of 4, which have fewer parameters than what is outside
        ("3.10.0", "full", 2, 18 * LAYER),
        ("3.9.0", "lora", 9, OUTER),
        # 3.12 gathers all for each group, until 3.12.6
        ("3.12.0", "full", 2, P),
        ("3.12.6", "full", 2, 18 * LAYER),
    ],
)
def test_zero3_gathers_a_group_of_weights_to_hand_them_on(
    version: str, method: str, batches: int | None, elements: int
) -> None:
    """`_move_full_model_to_vllm`, two bytes an element."""
    rollout = VLLM | ({"move_model_batches": batches} if batches else {})
    s = job(version, gpus=8, sharding="zero3", method=method, rollout=rollout, gpu="b200")
    moment = next(p.moment for p in estimate(s).groups[0].phases if p.name == "sync")
    [handed] = [line for line in moment.lines if line.source == "communication#handing"]
    assert handed.bytes == 2 * elements


def test_vllm_wakes_whole_before_weights_are_handed_on_until_3_6() -> None:
    old, new = (job(version, gpus=8, sharding="zero3", rollout=VLLM).keeps.stages[0] for version in ("3.5.3", "3.6.0"))
    assert (old.engine, new.engine) == ("all", "weights")


def test_a_server_has_gpus_of_its_own() -> None:
    s = job(gpus=8, sharding="zero3", placement="separate", rollout={"engine": "vllm", "gpus": 1, "n": 14},
            global_batch=28)  # fmt: skip
    assert [group.gpus for group in estimate(s).groups] == [7, 1]
    assert s.keeps.serving and s.keeps.serving.max_num_seqs == 256


@pytest.mark.parametrize(
    ("version", "fields", "message"),
    [
        ("3.4.1", {}, "versions.ms-swift: given 3.4.1, allowed: at least 3.5; not modelled"),
        ("4.6.0", {"rollout": {"n": 1}}, "rollout.n: given 1, allowed with ms-swift: at least 2"),
        ("4.6.0", {"rollout": {"engine": "none"}}, "rollout.engine: given 'none', allowed with ms-swift: hf, vllm"),
        ("4.6.0", {"gpus": 8, "sharding": "fsdp2"},
         "sharding: given 'fsdp2', allowed with trainer ms-swift for grpo: none, ddp, zero1, zero2, zero3; "
         "not modelled"),
        ("4.6.0", {"method": "qlora"},
         "method: given 'qlora', allowed with trainer ms-swift for grpo: full, lora; not modelled"),
        ("4.6.0", {"rollout": {"offload_model": True}},
         "rollout.offload_model: given true with engine 'hf', allowed: with vllm"),
        ("3.5.3", {"rollout": AWAY},
         "rollout.offload_model: given true with ms-swift 3.5.3, allowed: false; not modelled"),
        ("4.6.0", {"gpus": 8, "sharding": "zero2", "rollout": AWAY},
         "rollout.offload_model: given true with sharding zero2, allowed: false; not modelled"),
        ("4.6.0", {"gpus": 8, "sharding": "zero3", "global_batch": 16, "rollout": VLLM | {"batch": 3}},
         "rollout.batch: given 3 with rollout.n = 8, allowed: completions that are a multiple of micro_batch x GPUs of "
         "the actor = 16"),
    ],
)  # fmt: skip
def test_what_it_cannot_run_is_refused_in_one_line(version: str, fields: dict[str, Any], message: str) -> None:
    if "batch" in fields.get("rollout", {}):
        fields = fields | {"micro_batch": 2}
    with pytest.raises(ScenarioError) as refused:
        job(version, **fields)
    assert str(refused.value) == f"scenario: {message}"


def test_other_trainers_have_no_offload_while_vllm_generates() -> None:
    fields = {"framework": "trl", "trainer": "transformers", "gpus": 8, "sharding": "zero3"}
    with pytest.raises(ScenarioError, match=r"rollout\.offload_model: given true.*it has no such setting"):
        job(**fields, rollout=VLLM | {"offload_model": True}, versions={})
