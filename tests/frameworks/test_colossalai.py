"""ColossalChat's scripts on ColossalAI's plugin: defaults, what their variables keep, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from calc.estimate.estimate import estimate
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario, ScenarioError

SFT = {"model": "llama-2-7b", "task": "sft", "trainer": "colossalai", "gpu": "h800", "gpus": 2}
DPO = {**SFT, "task": "dpo", "checkpointing": "full", "attention": "flash", "seq_len": 2048, "micro_batch": 2}


def job(**fields: Any) -> Scenario:
    return parse(SFT | fields)


def test_the_scripts_shard_gradients_too_and_keep_fp32_masters() -> None:
    """`train_sft.py` with --plugin zero2 --mixed_precision bf16, in buckets of 12 Mi elements."""
    s = job()
    assert (s.sharding, s.precision, s.grad_dtype, s.optimizer_impl) == ("zero2", "mixed", "bf16", "fused")
    assert (s.outputs_kept, s.reentrant, s.checkpointing) == ("next", False, "none")
    assert (s.keeps.low_level, s.keeps.deepspeed) == (12 * 1024**2, None)
    assert s.keeps.roles[0].path.held == "next"


def test_losses_of_pairs_read_halves_of_the_logits_once_the_model_has_returned() -> None:
    """`coati/trainer/dpo.py`, `coati/models/utils.py`: a log-softmax of the logits in the type that they have."""
    path = job(task="simpo").keeps.roles[0].path
    assert (path.kind, path.halves, path.outside, path.upcast, path.held) == ("log-softmax", True, True, False, "next")
    assert not job().keeps.roles[0].path.halves


def test_the_reference_fills_a_cache_of_keys_and_values() -> None:
    """2048 tokens of 4 sequences, 32 layers of 2 · 4096 in bf16: 4 GiB; logits of 4.39 are fp32, of before they are 2.

    They and the head's input are there with the cache; so are the policy's logits, its log-softmax, and the logits of
    the micro batch before, which the reference's new ones replace.
    """
    e = estimate(parse({**DPO, "versions": {"transformers": "4.39", "torch": "2.1"}}))
    forward = next(p.moment for p in e.groups[0].phases if p.name == "forward")
    tokens, v, h = 4 * 2048, 32_000, 4096
    assert [line.bytes for line in forward.lines if line.component == "kv_cache"] == [tokens * 32 * 2 * h * 2]
    reference = sum(x.bytes for x in forward.lines if (x.component, x.role) == ("logits", "reference"))
    assert reference == pytest.approx(tokens * (4 * v + 2 * v + 4 * v), rel=0.01)
    assert not any(line.component == "kv_cache" for line in _forward(parse({**DPO, "trainer": "own"})))


def _forward(s: Scenario) -> list[Any]:
    return list(next(p.moment.lines for p in estimate(s).groups[0].phases if p.name == "forward"))


def test_the_references_logits_stay_to_the_step() -> None:
    """`ref_all_logits`, beside the policy's: 4 bytes for each of 32,000 entries and 8192 tokens, twice."""
    e = estimate(parse({**DPO, "versions": {"transformers": "4.39", "torch": "2.1"}}))
    step = next(p.moment for p in e.groups[0].phases if p.name == "step")
    assert sum(x.bytes for x in step.lines if x.component == "logits") == 2 * 4 * 32_000 * 8192


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "rm"}, "trainer: given 'colossalai' for rm, allowed: own; modelled for sft, dpo, simpo"),
        ({"sharding": "zero3"}, "sharding: given 'zero3' with trainer colossalai, allowed: zero1, zero2"),
        ({"sharding": "fsdp2", "precision": "fsdp-mixed"},
         "sharding: given 'fsdp2' with trainer colossalai, allowed: zero1, zero2"),
        ({"precision": "fp16"}, "precision: given 'fp16' with trainer colossalai, allowed: mixed"),
        ({"grad_dtype": "fp32"}, "grad_dtype: given 'fp32' with trainer colossalai, allowed: bf16"),
        ({"method": "qlora"}, "method: given 'qlora' with trainer colossalai, allowed: full, lora"),
        ({"optimizer": "sgd"}, "optimizer: given 'sgd' with trainer colossalai, allowed: adamw"),
        ({"outputs_kept": "none"}, "outputs_kept: given 'none' with trainer colossalai, allowed: next"),
        ({"offload.activations": True, "checkpointing": "full"},
         "offload.activations: given true with trainer colossalai, allowed: false; it has no switch for it"),
        ({"method": "lora", "lora.dropout": 0.1},
         "lora.dropout: given 0.1 with trainer colossalai, allowed: 0; its linears drop nothing out"),
        ({"tensor_parallel": 2},
         "trainer: given 'colossalai' where GPUs share sequences, allowed: own; not modelled"),
    ],
)  # fmt: skip
def test_what_the_plugin_cannot_run_is_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        job(**fields)
    assert message in str(caught.value)


def test_adapters_come_with_a_note() -> None:
    assert any("coati" in note for note in job(method="lora").keeps.notes)
