"""OpenRLHF by version: defaults and refusals, each row read in that release's packages and tags."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from jobs import job

from calc.frameworks import numbers, openrlhf
from calc.keeps import Path
from calc.scenario import Scenario, ScenarioError


def run(version: str = "0.6.1", **fields: Any) -> Scenario:
    """An OpenRLHF job."""
    return job(**{"framework": f"openrlhf=={version}"} | fields)


@pytest.mark.parametrize(
    ("version", "task", "seq_len", "micro_batch"),
    [
        ("0.3.1", "sft", 512, 8),
        ("0.3.6", "sft", 2048, 8),
        ("0.11.2", "sft", 2048, 8),
        ("0.3.1", "rm", 512, 8),
        ("0.3.6", "rm", 512, 1),
        ("0.8.10", "rm", 512, 1),
        ("0.3.1", "dpo", 512, 8),
        ("0.11.0", "dpo", 512, 8),
    ],
)
def test_lengths_and_micro_batches_are_the_command_lines(
    version: str, task: str, seq_len: int, micro_batch: int
) -> None:
    """cli/train_{sft,rm,dpo}.py; sft 512 and rm 8 before 0.3.6. train_batch_size is 128 throughout."""
    s = run(version, task=task)
    assert (s.seq_len, s.micro_batch, s.global_batch) == (seq_len, micro_batch, 128)
    assert (s.sharding, s.checkpointing, s.packing, s.offload.optimizer) == ("zero2", "none", False, False)


@pytest.mark.parametrize(
    ("version", "grad_dtype"), [("0.3.0", "fp32"), ("0.5.2", "fp32"), ("0.5.4", "bf16"), ("0.11.2", "bf16")]
)
def test_gradients_accumulate_in_fp32_until_0_5_3(version: str, grad_dtype: str) -> None:
    """`grad_accum_dtype if grad_accum_dtype else "fp32"`; later DeepSpeed decides, bf16 under ZeRO, fp32 without."""
    assert run(version).grad_dtype == grad_dtype
    assert run(version, sharding="none").grad_dtype == "fp32"


@pytest.mark.parametrize(("version", "attention"), [("0.3.8", "eager"), ("0.8.8", "eager"), ("0.8.10", "flash")])
def test_attention_is_eager_without_a_flag_until_0_8_9(version: str, attention: str) -> None:
    """`--flash_attn`; since 0.8.10 `attn_implementation=flash_attention_2` by default. Packing forces it always."""
    assert run(version).attention == attention
    assert run(version, packing=True).attention == "flash"


@pytest.mark.parametrize(
    ("version", "deepspeed", "transformers"),
    [
        ("0.3.1", "0.13.5", "4.41.0"),
        ("0.3.8", "0.14.4", "4.43.1"),
        ("0.4.6", "0.15.0", "4.46.1"),
        ("0.6.1", "0.16.4", "4.48.3"),
        ("0.6.4", "0.16.5", "4.50.0"),
        ("0.8.11", "0.17.6", "4.56.1"),
        ("0.11.0", "0.19.5", "5.15.0"),
        ("0.11.2", "0.19.6", "5.15.0"),
    ],
)
def test_releases_pin_their_libraries(version: str, deepspeed: str, transformers: str) -> None:
    """requirements.txt of the release."""
    versions = run(version).versions
    assert (versions["deepspeed"], versions["transformers"]) == (deepspeed, transformers)


def test_releases_are_in_order_and_0_3_is_the_last_of_its_series() -> None:
    """`openrlhf==0.3` reads as the last 0.3; a release in between behaves as the one before it."""
    assert all(numbers(a) < numbers(b) for a, b in pairwise(openrlhf.KNOWN))
    assert run("0.3").framework_version == "0.3.8"
    assert run("0.6.10").framework_version == "0.6.4"
    assert run("0.3.2").framework_version == "0.3.1"


@pytest.mark.parametrize(
    ("version", "sharding", "dtype"),
    [("0.6.1", "zero3", "bf16"), ("0.10.4", "zero3", "bf16"), ("0.11.0", "zero3", "fp32"), ("0.11.0", "zero2", "bf16")],
)
def test_adapters_are_cast_to_bf16_but_by_the_newest_deepspeed_under_zero_3(
    version: str, sharding: str, dtype: str
) -> None:
    """`_cast_module_mixed_precision` skips zero.Init models from DeepSpeed 0.19.2 (0.19.1, of 0.10.4, still casts)."""
    s = run(version, method="lora", sharding=sharding)
    assert s.lora is not None
    assert (s.lora.dtype, s.lora.rank, s.lora.dropout) == (dtype, 64, 0)


REFUSED = {
    "fsdp": {"gpus": 2, "sharding": "fsdp2"},
    "pure bf16": {"precision": "bf16"},
    "another optimizer": {"optimizer": "lion"},
    "the trained model's parameters offloaded": {"sharding": "zero3", "offload__parameters": True},
    "an offloaded optimizer without ZeRO": {"sharding": "none", "offload__optimizer": True},
    "bf16 accumulation without ZeRO": {"sharding": "none", "grad_dtype": "bf16"},
    "selective checkpointing": {"checkpointing": "selective"},
    "a fused loss": {"loss": "fused"},
    "4-bit weights under ZeRO-3": {"sharding": "zero3", "method": "qlora"},
    "packing with eager attention": {"packing": True, "attention": "eager"},
    "packing before 0.3.4": {"framework": "openrlhf==0.3.1", "packing": True},
    "a 4-bit reference before Transformers 4.45": {"framework": "openrlhf==0.3.8", "task": "dpo", "method": "qlora"},
    "a batch that its GPUs cannot share": {"gpus": 6, "micro_batch": 1, "global_batch": 128},
}


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED)
def test_what_cannot_run_is_refused_in_one_line(fields: dict[str, Any]) -> None:
    """The line names the field, what was given and what is allowed."""
    with pytest.raises(ScenarioError) as caught:
        run(**fields)
    line = str(caught.value)
    assert line.isprintable()
    assert "given" in line and "allowed" in line


ACCEPTED = {
    "a 4-bit reference from Transformers 4.45 on": {"framework": "openrlhf==0.6.1", "task": "dpo", "method": "qlora"},
    "adam_offload with LoRA": {"method": "lora", "offload__optimizer": True},
    "packing from 0.3.4 on": {"framework": "openrlhf==0.3.4", "packing": True},
    "the reference's parameters offloaded": {"task": "dpo", "roles": {"reference": {"offload.parameters": True}}},
    "the post's 126 pairs on 6 GPUs": {"gpus": 6, "micro_batch": 1, "global_batch": 126},
}


@pytest.mark.parametrize("fields", ACCEPTED.values(), ids=ACCEPTED)
def test_what_no_release_refuses_is_not_refused(fields: dict[str, Any]) -> None:
    """The other side of each refusal."""
    assert openrlhf.refuse(run(**fields)) is None


@pytest.mark.parametrize(
    ("version", "path"),
    [
        ("0.4.5", Path("cross-entropy", head_fp32=True, shift_copy=True, held=True, carried=True)),
        ("0.4.6", Path("log-softmax", shift_copy=True, held=True, carried=True)),
        ("0.5.6", Path("cross-entropy", head_fp32=True, shift_copy=True, held=True, carried=True)),
        ("0.7.0", Path("flash", head_fp32=True, held=True, carried=True)),
    ],
)
def test_sft_keeps_its_outputs_into_the_next_forward(version: str, path: Path) -> None:
    """`output` is a local of the trainer's loop; until 0.6.4 GPTLMLoss copies the shifted logits of several rows."""
    found = openrlhf.keeps(run(version, micro_batch=2)).path
    assert (found.held, found.carried, found.head_fp32, found.kind) == (
        path.held,
        path.carried,
        path.head_fp32,
        path.kind,
    )
    assert found.shift_copy == path.shift_copy
    assert not openrlhf.keeps(run(version, micro_batch=1)).path.shift_copy


def test_dpo_drops_its_outputs() -> None:
    """They are locals of `concatenated_forward`: only what autograd saved survives."""
    for version in openrlhf.KNOWN:
        path = openrlhf.keeps(run(version, task="dpo")).path
        assert not path.held and not path.carried
    assert openrlhf.keeps(run(task="rm")).path == Path("scalar")
    assert openrlhf.keeps(run(task="dpo", method="lora")).reference == "copy"
