"""Reading suites: the cases they expand to, what is refused, and what the worker is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import stub_worker

from calc.base.schema import InputError
from calc.catalog.catalog import load
from measurements.bench.machine import Machine
from measurements.bench.plan import Case, Plan, read

SUITES = sorted((Path(__file__).parents[2] / "measurements/suites").glob("*.yaml"))
MACHINE = Machine.of(stub_worker.MACHINE)
MACHINE = replace(MACHINE, versions={**MACHINE.versions, "trl": "1.16.0", "torchtune": "0.6.1", "torchtitan": "0.2.2"})
PLAN = Plan(load(), MACHINE, load().gpus["h200"])


def suite(path: Path, text: str) -> Path:
    file = path / "suite.yaml"
    file.write_text(text)
    return file


def test_each_gives_a_case_for_every_combination_the_last_field_fastest(tmp_path: Path) -> None:
    text = """
defaults: {framework: torch, seq_len: 512}
cases:
  - {model: qwen2.5-0.5b, task: sft, each: {micro_batch: [1, 2], checkpointing: [none, full]}}
  - {model: qwen2.5-0.5b, task: rm, seq_len: 64, lora: {rank: 4}, method: lora, expandable_segments: true}
"""
    assert [case.name for case in read(suite(tmp_path, text))] == [
        "qwen2.5-0.5b/sft/s512/mb1/checkpointing=none",
        "qwen2.5-0.5b/sft/s512/mb1/checkpointing=full",
        "qwen2.5-0.5b/sft/s512/mb2/checkpointing=none",
        "qwen2.5-0.5b/sft/s512/mb2/checkpointing=full",
        "qwen2.5-0.5b/rm/s64/lora.rank=4/method=lora/expandable_segments=True",
    ]


def test_a_scenario_is_a_suite_of_one(tmp_path: Path) -> None:
    (case,) = read(suite(tmp_path, "{model: Qwen/Qwen2.5-0.5B, task: sft}"))
    assert (case.name, case.scenario["model"]) == ("Qwen2.5-0.5B/sft", "Qwen/Qwen2.5-0.5B")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cases: []", "cases: given a list, [], allowed: a list that is not empty"),
        ("cases: [{task: sft}]", "cases[0]: missing field 'model'"),
        ("case: [{task: sft}]", "unknown field 'case'; did you mean 'cases'?"),
        (
            "cases: [{model: qwen2.5-0.5b, task: sft, bench: {step: 3}}]",
            "unknown field 'cases[0].bench.step'; did you mean 'cases[0].bench.steps'?",
        ),
        (
            "cases: [{model: qwen2.5-0.5b, task: sft}, {model: qwen2.5-0.5b, each: {task: [rm, sft]}}]",
            "cases[0]: given qwen2.5-0.5b/sft twice, allowed: each case once",
        ),
    ],
)
def test_a_suite_that_cannot_be_used_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = suite(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read(file)
    assert str(caught.value).startswith(f"{file}: {message}")


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ({"model": "qwen2.5-0.6b", "task": "sft"}, "case: model: given 'qwen2.5-0.6b'"),
        ({"model": "qwen2.5-0.5b", "task": "sft", "gpu": "rtx409"}, "case: gpu: given 'rtx409'"),
        (
            {"model": "qwen2.5-0.5b", "task": "sft", "seqlen": 8},
            "case: unknown field 'seqlen'; did you mean 'seq_len'?",
        ),
    ],
)
def test_a_scenario_that_cannot_be_used_is_refused_before_anything_runs(scenario: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        PLAN.check(Case(scenario))
    assert str(caught.value).startswith(message)


def test_a_card_stands_in_for_none_with_more_memory() -> None:
    small, large = (Case({"model": "qwen2.5-0.5b", "task": "sft", "gpu": gpu}) for gpu in ("rtx4090", "b200"))
    assert PLAN.runnable([large, small]) == [small]
    with pytest.raises(InputError, match="case: gpu: given b200, which has more memory than the h200 at hand"):
        PLAN.runnable([large])
    assert replace(PLAN, machine=replace(MACHINE, device="cpu")).runnable([large]) == [large]


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_every_suite_can_be_run_here(path: Path) -> None:
    cases = read(path)
    for case in cases:
        PLAN.check(case)
        if case.edge is None:
            assert PLAN.refuse(case) is None
            assert PLAN.job(case)["configs"]["model"]["model_type"]
        else:
            assert 0 < PLAN.guesses(case)["predicted"] < case.edge.highest // case.edge.step


def test_the_suites_are_there() -> None:
    assert {path.stem for path in SUITES} == {
        "smoke",
        "single-gpu",
        "families",
        "edge",
        "fsdp",
        "zero",
        "trl",
        "stacks-trl",
        "stacks-tune",
        "stacks-titan",
        "decode",
        "matmul",
        "serve",
    }


def test_the_single_gpu_suite_covers_what_it_is_for() -> None:
    cases = read(next(path for path in SUITES if path.stem == "single-gpu"))
    scenarios = [PLAN.scenario(case) for case in cases]
    assert len(cases) >= 60
    assert {s.task for s in scenarios} == {"sft", "rm", "dpo", "ppo"}
    assert {s.method for s in scenarios} == {"full", "lora", "qlora"}
    assert {s.checkpointing for s in scenarios} == {"none", "selective", "full"}
    assert {s.attention for s in scenarios} == {"sdpa", "eager", "flash"}
    assert {512, 2048, 16384} <= {s.seq_len for s in scenarios}
    assert {"fused", "foreach", "single"} == {s.optimizer_impl for s in scenarios}
    assert {"adamw", "adamw-8bit"} <= {s.optimizer for s in scenarios}
    assert sum(s.expandable_segments for s in scenarios) >= 4
    ten_minutes = 0.0
    for case in cases[:30]:
        ten_minutes += PLAN.seconds(case)
    assert ten_minutes < 600


def test_the_zero_suite_covers_what_it_is_for() -> None:
    scenarios = [PLAN.scenario(case) for case in read(next(path for path in SUITES if path.stem == "zero"))]
    assert len(scenarios) <= 16
    assert {s.sharding for s in scenarios} == {"zero1", "zero2", "zero3"}
    assert {s.grad_dtype for s in scenarios} == {"bf16", "fp32"}
    assert {s.method for s in scenarios} == {"full", "lora"}
    assert {s.precision for s in scenarios} == {"mixed"} and {s.optimizer_impl for s in scenarios} == {"fused"}


def test_deepspeed_is_modelled_in_the_version_that_runs() -> None:
    machine = replace(MACHINE, versions={**MACHINE.versions, "deepspeed": "0.19.8"})
    case = Case({"model": "qwen2.5-0.5b", "task": "sft", "sharding": "zero2", "gpus": 4})
    assert replace(PLAN, machine=machine).scenario(case).versions["deepspeed"] == "0.19.8"


def test_the_job_is_the_scenario_in_full_with_the_machines_versions() -> None:
    job = PLAN.job(Case({"model": "qwen2.5-0.5b", "task": "dpo", "method": "lora"}))
    s = job["scenario"]
    assert (s["gpu"], s["lora"]["rank"], s["logprob"]) == ("h200", 8, "log-softmax-fp32")
    assert (s["versions"]["torch"], s["versions"]["transformers"]) == ("2.11.0", "5.17.0")
    assert job["configs"]["reference"] == job["configs"]["model"]
    assert None not in s.values() and job["limit_bytes"] is None


def test_a_smaller_card_is_its_memory_less_a_context() -> None:
    case = Case({"model": "qwen2.5-0.5b", "task": "sft", "gpu": "rtx4090"})
    assert PLAN.limit(case) == load().gpus["rtx4090"].usable_bytes - stub_worker.MACHINE["context_bytes"]
    assert PLAN.limit(replace(case, scenario={**case.scenario, "gpu": "H200"})) is None
    without = Plan(load(), replace(MACHINE, device="cpu"), load().gpus["h200"])
    assert without.limit(case) is None


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"precision": "mixed"}, "not run: precision mixed is not built here"),
        ({"sharding": "zero2", "gpus": 4, "method": "qlora"}, "not run: method qlora is not built here"),
        ({"sharding": "zero3", "gpus": 4, "optimizer": "none"}, "not run: optimizer none is not built here"),
        (
            {"sharding": "zero3", "gpus": 4, "offload": {"optimizer": True}},
            "not run: offload is not built here",
        ),
        ({"sharding": "ddp", "gpus": 4}, "not run: sharding ddp is not built here"),
        ({"framework": "openrlhf"}, "not run: framework openrlhf is not built here"),
        ({"task": "grpo"}, "not run: task grpo is not built here"),
        ({"task": "ppo"}, "not run: of RL one role's update or score is built here, without generation"),
        ({"tensor_parallel": 2, "gpus": 2}, "not run: tensor_parallel 2 is not built here"),
        ({"loss": "fused"}, "not run: loss fused is not built here"),
        ({"seq_len": 64, "expected_len": 32}, "not run: rows shorter than seq_len are not built here"),
        ({"framework": "trl", "gpus": 2}, "not run: sharding ddp is not built here"),
        ({"trainer": "llamafactory"}, "not run: trainer llamafactory is not built here"),
        ({"compile": "model"}, "not run: compile model is not built here"),
        ({"optimizer_in_backward": True}, "not run: optimizer_in_backward True is not built here"),
        ({"checkpointing": "full", "offload": {"activations": True}}, "not run: offload is not built here"),
        ({"framework": "trl", "task": "gkd"}, "not run: task gkd is not built here"),
        (
            {"framework": "trl", "optimizer_impl": "single"},
            "not run: adamw as single, for which the trainer has no name",
        ),
        ({"trainer": "torchtune", "task": "dpo"}, "not run: task dpo is not built here"),
        ({"trainer": "torchtune", "gpus": 2}, "not run: sharding fsdp2 is not built here"),
        ({"trainer": "torchtune", "model": "mistral-7b"}, "not run: torchtune's mistral is not built here"),
        (
            {"trainer": "torchtune", "method": "qlora"},
            "not run: qlora of qwen2, in which torchtune leaves some linears in 16 bits",
        ),
        (
            {"trainer": "torchtune", "method": "lora", "lora": {"targets": ["q_proj", "up_proj"]}},
            "not run: adapters on q_proj, up_proj, which torchtune's builders do not place",
        ),
        ({"trainer": "torchtitan", "task": "pretrain", "model": "mistral-7b"}, "not run: torchtitan has no mistral"),
        (
            {"trainer": "torchtitan", "task": "pretrain", "gpus": 4, "pipeline_parallel": 2, "model": "llama-3-8b"},
            "not run: pipeline_parallel 2 is not built here",
        ),
        (
            {"framework": "trl", "task": "grpo", "rollout": {"engine": "vllm"}},
            "not run: GRPO with vLLM or a reward model is not built here",
        ),
        (
            {"framework": "trl", "task": "dpo", "method": "lora", "lora": {"dropout": 0.1}},
            "not run: dropout of adapters, which the trainer of pairs disables",
        ),
        (
            {"framework": "trl", "method": "lora", "precision": "bf16", "lora": {"dtype": "bf16"}},
            "not run: adapters in bf16, which the trainer would not make",
        ),
    ],
)
def test_what_the_worker_cannot_do_is_a_reason_and_no_error(field: dict[str, object], reason: str) -> None:
    assert PLAN.refuse(Case({"model": "qwen2.5-0.5b", "task": "sft", **field})) == reason


def test_trl_is_run_in_the_release_that_is_modelled_or_not_at_all() -> None:
    case = Case({"model": "qwen2.5-0.5b", "task": "sft", "framework": "trl"})
    assert PLAN.refuse(case) is None
    for versions, installed in (({"trl": "1.15.0"}, "1.15.0"), ({}, "none")):
        plan = replace(PLAN, machine=replace(MACHINE, versions=versions))
        assert plan.refuse(case) == f"not run: trl 1.16.0, with {installed} installed"


@pytest.mark.parametrize(("versions", "installed"), [({"torchtune": "0.5.0"}, "0.5.0"), ({}, "none")])
def test_torchtune_is_run_in_the_release_that_is_modelled_or_not_at_all(
    versions: dict[str, str], installed: str
) -> None:
    case = Case({"model": "llama-3.2-1b", "task": "sft", "trainer": "torchtune"})
    plan = replace(PLAN, machine=replace(MACHINE, versions=versions))
    assert plan.refuse(case) == f"not run: torchtune 0.6.1, with {installed} installed"
    assert PLAN.refuse(case) is None
    assert PLAN.environment(case)["BENCH_STEPS"] == "torchtune"


def test_torchtitan_runs_as_one_rank_with_the_allocator_of_its_launcher() -> None:
    """`run_train.sh` sets expandable segments, which the trainer's defaults say and no case repeats."""
    case = Case({"model": "llama-3-8b", "task": "pretrain", "trainer": "torchtitan", "gpus": 8})
    assert PLAN.refuse(case) is None
    seen = PLAN.environment(case)
    assert (seen["BENCH_STEPS"], seen["PYTORCH_ALLOC_CONF"]) == ("torchtitan", "expandable_segments:True")
    fixed = PLAN.environment(replace(case, scenario={**case.scenario, "expandable_segments": False}))
    assert fixed["PYTORCH_ALLOC_CONF"] == "expandable_segments:False"
    plan = replace(PLAN, machine=replace(MACHINE, versions={**MACHINE.versions, "torchtitan": "0.1.0"}))
    old = Case({**case.scenario, "versions": {"torchtitan": "0.2.2"}})
    assert plan.refuse(old) == "not run: torchtitan 0.2.2, with 0.1.0 installed"


@pytest.mark.parametrize("stem", ["stacks-trl", "stacks-tune"])
def test_a_suite_of_a_stack_varies_what_no_other_suite_does(stem: str) -> None:
    scenarios = [PLAN.scenario(case) for case in read(next(path for path in SUITES if path.stem == stem))]
    assert 25 <= len(scenarios) <= 40
    assert {s.offload.activations for s in scenarios} == {s.packing for s in scenarios} == {True, False}
    if stem == "stacks-trl":
        assert {s.kernels for s in scenarios} == {"eager", "liger"}
        assert {"kto", "orpo", "simpo"} <= {s.task for s in scenarios}
        assert {"adafactor", "lion", "adamw-torchao-8bit", "adamw-paged"} <= {s.optimizer for s in scenarios}
    else:
        assert {"none", "loss", "model-and-loss"} == {s.compile for s in scenarios}
        assert {s.method for s in scenarios} == {"full", "lora", "qlora"}
        assert {s.optimizer_in_backward for s in scenarios} == {True, False}
        assert {s.loss for s in scenarios} == {"chunked", "full"}


def test_what_compiles_is_expected_to_take_longer() -> None:
    def seconds(**fields: object) -> float:
        return PLAN.seconds(Case({"model": "llama-3.2-1b", "task": "sft", "trainer": "torchtune", **fields}))

    assert seconds(optimizer="adamw") < seconds(compile="model-and-loss")
    assert seconds(optimizer="adamw") < seconds(optimizer="adamw-torchao-8bit") == seconds(packing=True)


def test_a_framework_of_its_own_is_part_of_a_name_and_decides_what_the_worker_runs() -> None:
    case = Case({"model": "qwen2.5-0.5b", "task": "sft", "framework": "trl"})
    assert case.name == "qwen2.5-0.5b/sft/framework=trl"
    assert PLAN.environment(case)["BENCH_STEPS"] == "trl"
    assert "BENCH_STEPS" not in PLAN.environment(Case({**case.scenario, "framework": "torch"}))


def test_longer_work_is_expected_to_take_longer() -> None:
    def seconds(**fields: object) -> float:
        return PLAN.seconds(Case({"model": "llama-3-8b", "task": "sft", "seq_len": 4096, **fields}))

    assert seconds() < seconds(checkpointing="full") < seconds(seq_len=8192) < seconds(seq_len=8192, task="dpo")


@pytest.mark.parametrize(
    ("name", "mib", "gpu"),
    [
        ("NVIDIA H200", 143156, "h200"),
        ("NVIDIA GeForce RTX 4090", 24207, "rtx4090"),
        ("NVIDIA A100-SXM4-80GB", 81153, "a100-80-sxm"),
        ("NVIDIA A100-PCIE-40GB", 40441, "a100-40-pcie"),
        ("NVIDIA L40S", 45500, "l40s"),
        ("NVIDIA A10G", 22500, "a10g"),
        ("NVIDIA H100 80GB HBM3", 81079, "h100-sxm"),  # no PCIe card has HBM3
        ("NVIDIA H100 PCIe", 81009, "h100-pcie"),
        ("Tesla V100-SXM2-32GB", 32494, "v100-32"),
    ],
)
def test_the_device_is_found_in_the_catalog_by_its_name_and_memory(name: str, mib: int, gpu: str) -> None:
    assert Machine("cuda", name, {}, total_bytes=mib * 2**20).gpu(load(), None).id == gpu


@pytest.mark.parametrize(
    ("name", "mib", "allowed"),
    [
        ("NVIDIA H100 80GB", 81009, "one of h100-pcie, h100-sxm"),
        ("NVIDIA GeForce GTX 1080", 8100, "an id that `python -m calc gpus` lists"),
    ],
)
def test_a_device_that_is_not_clear_is_asked_for(name: str, mib: int, allowed: str) -> None:
    machine = Machine("cuda", name, {}, total_bytes=mib * 2**20)
    with pytest.raises(InputError, match=f"allowed: {allowed}"):
        machine.gpu(load(), None)
    assert machine.gpu(load(), "h100-sxm").id == "h100-sxm"
