"""litgpt's scripts as a trainer of plain PyTorch: defaults, what Fabric keeps, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from calc.accuracy.residuals import peak_allocated
from calc.base.plan import Path
from calc.estimate.estimate import estimate
from calc.memory.weights import NF4
from calc.resolve.parse import parse
from calc.scenario.scenario import Scenario, ScenarioError

ONE = {"model": "llama-2-7b", "task": "sft", "trainer": "litgpt", "gpu": "a100-40-sxm", "method": "lora"}


def job(**fields: Any) -> Scenario:
    return parse(ONE | fields)


def test_one_gpu_runs_whole_layers_and_several_shard_and_recompute_them() -> None:
    """`finetune/lora.py` of 0.4.0: FSDPStrategy where devices > 1, a Block a unit, which is run again."""
    alone, several = job(), job(gpus=2)
    assert (alone.sharding, alone.checkpointing, alone.no_sync) == ("none", "none", False)
    assert (several.sharding, several.checkpointing, several.no_sync) == ("fsdp1", "full", True)
    assert alone.lora is not None
    assert several.lora is not None
    assert (alone.lora.targets, alone.lora.dropout, alone.lora.dtype) == (("q_proj", "v_proj"), 0.05, "bf16")
    assert (alone.lora.units, several.lora.units) == ("own", "layer")
    assert (alone.precision, alone.optimizer_impl, alone.loss) == ("bf16", "foreach", "chunked")


def test_logits_are_pieces_of_128_positions_of_every_row() -> None:
    [role] = job(micro_batch=3, seq_len=1000).keeps.roles
    assert role.path == Path("pieces", held="step", tile=384)
    [short] = job(micro_batch=3, seq_len=100).keeps.roles
    assert short.path.tile == 300


def test_without_adapters_the_loss_takes_pieces_of_all_logits() -> None:
    """`chunked_cross_entropy` on a tensor; fine-tuning shifts, which is a view of one row and a copy of several."""
    [one], [two] = (job(method="full", micro_batch=rows).keeps.roles for rows in (1, 2))
    assert one.path == Path("selective", head_fp32=True, held="next", cut="slice", tile=128, outside=True)
    assert two.path == Path("selective", head_fp32=True, held="next", cut="slice", copied=True, tile=128, outside=True)
    pretrained = job(method="full", task="pretrain", gpus=2, micro_batch=2)
    assert pretrained.keeps.roles[0].path == Path("selective", head_fp32=True, held="next", tile=128, outside=True)
    assert (pretrained.checkpointing, pretrained.optimizer_impl) == ("none", "fused")


def test_logits_are_cast_beside_those_of_the_batch_before() -> None:
    """Llama 2 7B, 4,096 tokens: those of before in fp32, which the loop still names, these in 16 bits and in fp32.

    Beside them the head keeps its input, in 16 bits.
    """
    fields = {"method": "full", "task": "pretrain", "gpu": "h200", "micro_batch": 2, "seq_len": 2048}
    lines = next(p for p in estimate(job(**fields)).groups[0].phases if p.name == "forward").moment.lines
    assert (
        sum(line.bytes for line in lines if line.component == "logits") == (4 + 2 + 4) * 4096 * 32_000 + 2 * 4096 * 4096
    )


def test_layers_are_never_run_again_by_reentrant_checkpointing() -> None:
    """lightning `fabric/strategies/fsdp.py`: CheckpointImpl.NO_REENTRANT, whatever Transformers does."""
    assert not job(gpus=2, **{"versions.transformers": "4.40"}).reentrant


def test_four_bits_hold_the_head_and_come_back_twice() -> None:
    """Llama 2 7B, generating a few tokens: the head's two 16-bit copies, where one of an MLP's weight had been most.

    The head itself takes half a byte and scales for each element, in place of two.
    """
    v, h, i = 32_000, 4_096, 11_008
    weights = {"task": "inference", "method": "qlora", "seq_len": 56}
    whole, four = (estimate(parse(ONE | weights | {"trainer": t})) for t in ("own", "litgpt"))
    more = (2 * 2 - 2 + NF4[True]) * v * h - 2 * i * h
    assert peak_allocated(four) - peak_allocated(whole) == pytest.approx(more, rel=0.01)
    assert four.scenario.keeps.roles[0].unpacks == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "qwen2.5-7b"}, "trainer: given 'litgpt', allowed: own, transformers for the family qwen2; "
         "litgpt's code is read for llama, mistral, falcon"),
        ({"task": "dpo"}, "trainer: given 'litgpt' for dpo, allowed: own; modelled for pretrain, sft, inference"),
        ({"task": "pretrain"}, "method: given 'lora' for pretrain with trainer litgpt, allowed: full"),
        ({"sharding": "zero3", "gpus": 2}, "sharding: given 'zero3' with trainer litgpt, allowed: none, ddp, fsdp1"),
        ({"sharding": "fsdp2", "gpus": 2}, "sharding: given 'fsdp2' with trainer litgpt, allowed: none, ddp, fsdp1"),
        ({"precision": "autocast"}, "precision: given 'autocast' with trainer litgpt, allowed: bf16, fp32"),
        ({"loss": "full"}, "loss: given 'full' with trainer litgpt, allowed: chunked"),
        ({"attention": "eager"}, "attention: given 'eager' with trainer litgpt, allowed: sdpa"),
        ({"lora.dtype": "fp32"}, "lora.dtype: given 'fp32' with trainer litgpt, allowed: bf16, as the model"),
        ({"gpus": 2, "tensor_parallel": 2},
         "trainer: given 'litgpt' where GPUs share sequences, allowed: own; not modelled"),
        ({"framework": "trl"}, "trainer: given 'litgpt', allowed with trl: transformers"),
    ],
)  # fmt: skip
def test_what_litgpt_cannot_run_is_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        job(**fields)
    assert str(caught.value) == f"scenario: {message}"
