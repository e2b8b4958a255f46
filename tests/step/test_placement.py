"""The kernel that runs, the formats in which a model is kept, and the engine that holds it."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import P, engine, job, replica_of

from calc.catalog.catalog import load
from calc.engines.fsdp import Fsdp
from calc.engines.fsdp1 import Fsdp1
from calc.engines.plain import Plain
from calc.engines.replica import Replica, Where
from calc.engines.zero import Zero
from calc.frameworks.releases import READ
from calc.models.releases import with_heads
from calc.resolve.parse import parse
from calc.scenario.words import SERVERS
from calc.step import placement


def replica(*, trained: bool = True, **fields: object) -> Replica:
    """The model of `job(**fields)`."""
    return replica_of(job(**fields), trained=trained)


@pytest.mark.parametrize(
    ("model", "attention", "precision", "kernel"),
    [
        ("llama-3-8b", "eager", "bf16", "eager"),
        ("llama-3-8b", "flash", "bf16", "flash"),
        ("llama-3-8b", "sdpa", "bf16", "flash"),
        ("llama-3-8b", "sdpa", "autocast", "flash"),
        # fp32: memory-efficient with as many keys as queries, else the plain mathematics
        ("llama-2-7b", "sdpa", "fp32", "efficient"),
        ("llama-3-8b", "sdpa", "fp32", "math"),
        # values narrower than queries
        ("deepseek-v2-lite", "sdpa", "bf16", "efficient"),
        # a lone key that SDPA is not told of; and a model without code for SDPA
        ("falcon-7b", "sdpa", "bf16", "math"),
        ("falcon-7b", "flash", "bf16", "flash"),
        ("gpt-j-6b", "sdpa", "bf16", "eager"),
        ("gpt-neo-1.3b", "sdpa", "bf16", "eager"),
        # Gemma's heads of 256 are the largest that FlashAttention takes
        ("gemma-7b", "sdpa", "bf16", "flash"),
        # sinks
        ("gpt-oss-20b", "sdpa", "bf16", "eager"),
        ("gpt-oss-20b", "flash", "bf16", "flash"),
    ],
)
def test_sdpa_runs_the_kernel_that_pytorch_has_for_the_model(
    model: str, attention: str, precision: str, kernel: str
) -> None:
    """torch sdp_utils.cpp: FlashAttention needs 16 bits and equal heads of at most 256."""
    assert placement.kernel(load().model(model).architecture, attention, precision) == kernel


def test_keys_of_every_query_head_in_fp32_have_the_memory_efficient_kernel() -> None:
    """Transformers repeats them before 4.54; it is grouped queries that neither of SDPA's kernels takes in fp32."""
    arch = with_heads(load().model("llama-3-8b").architecture, "4.53.3", "2.7")
    assert placement.kernel(arch, "sdpa", "fp32") == "efficient"


def test_adapters_side_by_side_are_tensors_of_their_own() -> None:
    """Four beside each linear: the parameters of one, four times, in four times as many tensors, all trained."""
    one, four = (replica(model="llama-3-8b", method="lora", **{"lora.count": n}) for n in (1, 4))
    assert (four.adapter, four.trainable) == (4 * one.adapter, 4 * one.trainable)
    assert sum(t.count for t in four.trained_tensors) == 4 * sum(t.count for t in one.trained_tensors)
    assert sum(t.elements * t.count for t in four.trained_tensors) == four.adapter


def test_only_sdpa_has_keys_repeated() -> None:
    def repeated(**fields: object) -> bool:
        return replica(model="llama-3-8b", versions={"transformers": "4.53.3"}, **fields).arch.repeated

    assert (repeated(attention="sdpa"), repeated(attention="flash")) == (True, False)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # bytes of weight, gradient, master, and what is stepped
        ({}, (2, 2, 0, 2)),
        ({"precision": "fp32"}, (4, 4, 0, 4)),
        ({"precision": "autocast"}, (4, 4, 0, 4)),
        ({"grad_dtype": "fp32"}, (2, 2, 0, 2)),
        ({"precision": "mixed"}, (2, 2, 4, 4)),
        ({"precision": "mixed", "grad_dtype": "fp32"}, (2, 4, 4, 4)),
        ({"precision": "fsdp-mixed", "sharding": "fsdp2", "gpus": 2}, (4, 4, 0, 4)),
    ],
)
def test_each_precision_has_its_formats(fields: dict[str, object], expected: tuple[int, ...]) -> None:
    """As the contract words them: `mixed` alone has a master, and an accumulation type of its own."""
    r = replica(**fields)
    assert (r.weight_bytes, r.grad_bytes, r.master_bytes, r.step_bytes) == expected


@pytest.mark.parametrize(
    ("method", "version", "kept"),
    [("qlora", "0.43.1", True), ("qlora", "0.43.2", False), ("qlora", None, False), ("lora", "0.42", False)],
)
def test_four_bit_products_keep_their_inputs_by_bitsandbytes_version(
    method: str, version: str | None, kept: bool
) -> None:
    """autograd/_functions.py: ctx.tensors = (A, B) in 0.43.1, (None, B) in 0.43.2 and since."""
    fields = {"versions__bitsandbytes": version} if version else {}
    assert replica(method=method, **fields).run.keeps_inputs is kept


@pytest.mark.parametrize(
    ("transformers", "expected"), [("4.38.2", "0.42.0"), ("4.42.4", "0.43.1"), ("4.43.0", READ["bitsandbytes"])]
)
def test_bitsandbytes_is_as_new_as_transformers(transformers: str, expected: str) -> None:
    """0.43.0 came a week after Transformers 4.38.2, 0.43.2 on the day of 4.43.0; a release that is named stands."""
    fields: dict[str, Any] = {"method": "qlora", "versions": {"transformers": transformers}}
    assert job(**fields).versions["bitsandbytes"] == expected
    fields["versions"]["bitsandbytes"] = "0.41"
    assert job(**fields).versions["bitsandbytes"] == "0.41"


@pytest.mark.parametrize(("version", "kept"), [("0.44.1", True), ("0.45", False)])
def test_eight_bit_products_keep_their_inputs_in_eight_bits_before_bitsandbytes_045(version: str, kept: bool) -> None:
    """autograd/_functions.py: double_quant for every input in 0.44, int8_vectorwise_quant of frozen weights in 0.45."""
    r = replica(method="qlora", load_in_8bit=True, versions__bitsandbytes=version)
    assert r.run.keeps_columns is kept


def test_full_training_trains_every_tensor() -> None:
    """P of Llama 3 8B; as a reward model V·h less and one row of 4,096 more."""
    assert replica().trainable == replica().parameters == P
    assert replica(task="rm").trainable == P - 525_336_576 + 4096


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", (2, 2, 2)), ("fp32", (4, 4, 4))])
def test_adapters_have_a_format_of_their_own(dtype: str, expected: tuple[int, ...]) -> None:
    """Beside bf16 weights: gradient and states in the adapter's type. Rank 64 on all linears: 167,772,160."""
    r = replica(method="lora", lora__rank=64, lora__dtype=dtype)
    assert r.weight_bytes == 2
    assert (r.adapter_bytes, r.grad_bytes, r.step_bytes) == expected
    assert r.trainable == r.adapter == 167_772_160
    assert sum(t.elements * t.count for t in r.trained_tensors) == 167_772_160


def test_adapters_sit_beside_the_layers_that_are_named() -> None:
    """q_proj alone, rank 8: A (8, 4096) and B (4096, 8) in 32 layers."""
    r = replica(method="lora", lora__rank=8, lora__targets=["q_proj"])
    assert [(t.shape, t.count) for t in r.trained_tensors] == [((8, 4096), 32), ((4096, 8), 32)]
    assert r.largest == 8 * 4096


def test_a_frozen_model_trains_nothing() -> None:
    """Neither does a job without an optimizer."""
    for r in (replica(trained=False), replica(trained=False, method="lora"), replica(optimizer="none")):
        assert (r.optimizer, r.trainable, r.trained_tensors, r.adapter) == (None, 0, (), 0)


def test_a_step_of_several_micro_batches_accumulates() -> None:
    """global_batch = micro_batch · GPUs · accumulation."""
    assert not replica(gpus=4, global_batch=4).accumulates
    assert replica(gpus=4, global_batch=8).accumulates
    assert replica(gpus=4, global_batch=8).ranks == 4


@pytest.mark.parametrize(
    ("fields", "kind", "what"),
    [
        ({}, Plain, {"buckets": False}),
        ({"gpus": 2, "sharding": "ddp"}, Plain, {"buckets": True}),
        ({"gpus": 1, "sharding": "ddp"}, Plain, {"buckets": False}),
        ({"gpus": 2, "sharding": "fsdp1"}, Fsdp1, {"offload": False}),
        ({"gpus": 2, "sharding": "fsdp2", "offload__parameters": True}, Fsdp, {"offload": True}),
        ({"gpus": 2, "sharding": "zero3"}, Zero, {"stage": 3, "offload_optimizer": False}),
        ({"framework": "openrlhf", "offload__optimizer": True}, Zero, {"stage": 2, "offload_optimizer": True}),
        # DeepSpeed at stage 0 partitions fp32 states as stage 1 does
        ({"framework": "openrlhf", "sharding": "none"}, Zero, {"stage": 1}),
    ],
)
def test_the_sharding_names_the_engine(fields: dict[str, object], kind: type, what: dict[str, object]) -> None:
    """OpenRLHF runs DeepSpeed whatever the sharding; plain PyTorch only where ZeRO is asked for."""
    found = engine(**fields)
    assert type(found) is kind
    assert {name: getattr(found, name) for name in what} == what


def test_an_attention_that_nothing_knows_fails_at_once() -> None:
    unknown: Any = "linear"
    with pytest.raises(AssertionError, match="linear"):
        placement.kernel(load().model("llama-3-8b").architecture, unknown, "bf16")


@pytest.mark.parametrize("sharding", ["fsdp1", "fsdp2", "zero2"])
def test_a_place_in_the_step_that_nothing_knows_fails_at_once(sharding: str) -> None:
    unknown: Any = "nowhere"
    with pytest.raises(AssertionError, match="nowhere"):
        engine(gpus=2, sharding=sharding).at(Where(unknown, 0, True))


def test_whatever_serves_has_an_engine() -> None:
    assert placement.SERVING.keys() == SERVERS.keys()


@pytest.mark.parametrize(
    ("model", "method", "precision"),
    [
        ("starcoder-15b", "qlora", "autocast-wide"),
        ("starcoder-15b", "lora", "autocast-bf16"),
        ("llama-3-8b", "qlora", "autocast-bf16"),
    ],
)
def test_layer_norms_widen_the_stream_behind_4_bit_linears(model: str, method: str, precision: str) -> None:
    """Autocast runs LayerNorm in fp32, and a 4-bit linear returns the type of its input; others return 16 bits."""
    fields = {"task": "sft", "gpu": "a100-80-sxm", "framework": "torch", "trainer": "transformers", "precision": "bf16"}
    s = parse({**fields, "model": model, "method": method})
    assert placement.place(s, s.keeps.roles[0], s.keeps).engine.replica.run.precision == precision
