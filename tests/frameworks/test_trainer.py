"""Transformers' Trainer with plain Transformers: what it and Accelerate do to a model, read in both packages."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import job

from calc.base.units import GiB
from calc.estimate.estimate import estimate
from calc.scenario.scenario import Scenario, ScenarioError


def run(**fields: Any) -> Scenario:
    """A job of Transformers' Trainer."""
    return job(**{"trainer": "transformers"} | fields)


def allocated(s: Scenario, phase: str) -> int:
    """Bytes that PyTorch has allocated at a phase's peak."""
    (group,) = estimate(s).groups
    (found,) = (p.moment.allocated_bytes for p in group.phases if p.name == phase)
    return found


def test_a_loop_of_ones_own_is_the_default_with_plain_transformers_and_not_with_trl() -> None:
    assert job().trainer == "own"
    assert job(framework="trl").trainer == "transformers"
    assert job(framework="openrlhf").trainer == job(framework="verl").trainer == "own"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"framework": "trl", "trainer": "own"}, "trainer: given 'own', allowed with trl: transformers"),
        ({"framework": "verl"}, "trainer: given 'transformers', allowed with verl: own"),
        ({"framework": "openrlhf"}, "trainer: given 'transformers', allowed with openrlhf: own"),
        ({"task": "ppo"}, "trainer: given 'transformers' for ppo, allowed: own"),
        ({"task": "inference"}, "trainer: given 'transformers' for inference, allowed: own"),
        ({"gpus": 2, "tensor_parallel": 2}, "trainer: given 'transformers' where GPUs share sequences, allowed: own"),
        ({"trainer": "hf"}, "trainer: given 'hf', allowed: own, transformers"),
    ],
)
def test_what_the_trainer_cannot_run_is_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError) as refused:
        run(**fields)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "impl"),
    [
        ({}, "fused"),
        ({"versions__transformers": "4.54"}, "fused"),
        ({"versions__transformers": "4.53.3"}, "foreach"),
        ({"versions__torch": "2.7.1"}, "foreach"),
        ({"versions__torch": "2.8"}, "fused"),
        ({"optimizer": "adamw-8bit"}, "foreach"),
        ({"optimizer": "adafactor"}, "single"),
        ({"trainer": "own"}, "foreach"),
    ],
)
def test_adamw_is_fused_since_transformers_4_54_with_torch_2_8(fields: dict[str, Any], impl: str) -> None:
    """`default_optim` of training_args.py in 4.53.3, 4.54.1 and 5.23."""
    assert run(**fields).optimizer_impl == impl


@pytest.mark.parametrize("sharding", ["fsdp1", "fsdp2"])
def test_fsdp_keeps_whole_gradients_while_it_accumulates(sharding: str) -> None:
    """`no_sync` until the last micro-batch: 2 bytes for each of 8,030,261,248 parameters but what is reduced by then.

    The loop of one's own reduces each time, into fp32 shards of one eighth.
    """
    fields = {"model": "llama-3.1-8b", "gpus": 8, "sharding": sharding, "precision": "fsdp-mixed", "global_batch": 32}
    trainer = allocated(run(**fields, seq_len=512, checkpointing="full"), "forward")
    own = allocated(job(**fields, seq_len=512, checkpointing="full"), "forward")
    once = allocated(run(**fields | {"global_batch": 8}, seq_len=512, checkpointing="full"), "forward")
    assert trainer - once == pytest.approx(2 * 8_030_261_248, rel=0.01)
    assert own - once == pytest.approx(4 * 8_030_261_248 / 8, rel=0.01)


def test_autocast_is_accelerates_but_for_fsdp_2_and_deepspeed() -> None:
    """`prepare_model` wraps a forward; FSDP 2 goes through `_prepare_fsdp2`, DeepSpeed's engine casts by itself."""
    wrapped = {}
    for sharding in ("none", "ddp", "fsdp1", "fsdp2", "zero2", "zero3"):
        gpus = {} if sharding == "none" else {"gpus": 4, "sharding": sharding}
        (role,) = run(**gpus).keeps.roles
        wrapped[sharding] = role.wrapped
    assert [name for name, is_wrapped in wrapped.items() if is_wrapped] == ["none", "ddp", "fsdp1"]
    assert not run(precision="fp32").keeps.roles[0].wrapped
    assert not job().keeps.roles[0].wrapped


def test_fp32_adapters_keep_inputs_of_16_bits() -> None:
    """Without autocast PEFT casts the input of each fp32 adapter to fp32 and keeps that copy."""
    adapters = {"method": "lora", "lora__dtype": "fp32", "lora__rank": 8}
    assert allocated(run(**adapters), "backward") < allocated(job(**adapters), "backward") - GiB


def test_pairs_keep_their_dropout() -> None:
    """TRL switches it off, the Trainer does not."""
    adapters = {"method": "lora", "lora__dropout": 0.1, "task": "rm"}
    assert run(**adapters).keeps.roles[0].dropout
    assert not run(**adapters, framework="trl").keeps.roles[0].dropout


def test_dpo_copies_the_slice_of_logits_that_accelerate_has_made_fp32() -> None:
    """Llama 3.2 1B, one pair of 512 tokens: at the log-softmax of the whole-precision logits 4·2·512·V bytes, of their
    slice of 511 positions a copy and its log-softmax; a loop of its own casts the 16-bit slice, which copies it, too.
    """
    fields = {"model": "llama-3.2-1b", "task": "dpo", "seq_len": 512}
    path = run(**fields).keeps.roles[0].path
    assert (path.head_fp32, path.upcast, path.kept) == (True, True, 511 / 512)
    assert not job(**fields).keeps.roles[0].path.head_fp32
    trainer, own = (allocated(s, "forward") for s in (run(**fields), job(**fields)))
    # fp32 logits stay where 16-bit ones did, beside what both have
    assert trainer - own == pytest.approx(2 * 2 * 512 * 128_256, rel=0.01)


@pytest.mark.parametrize(("accelerate", "once"), [("1.10.1", False), ("1.11", True), (None, True)])
def test_fsdp_2_reduces_every_micro_batch_before_accelerate_1_11(accelerate: str | None, once: bool) -> None:
    """Until then `no_sync` was `getattr(model, "no_sync", nullcontext)`, and FSDP 2 has no such method; FSDP 1 has."""
    fields = {"versions__accelerate": accelerate} if accelerate else {}
    for sharding, found in (("fsdp2", once), ("fsdp1", True)):
        s = job(trainer="transformers", gpus=8, sharding=sharding, precision="fsdp-mixed", **fields)
        assert s.no_sync is found
