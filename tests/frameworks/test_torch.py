"""Plain PyTorch: what a loop without further settings does, and what it cannot run."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import job

from calc.base.plan import Path
from calc.base.versions import at_least, nearest, numbers
from calc.frameworks.torch import torch
from calc.scenario.scenario import ScenarioError


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.6", "0.6.4"), ("0.6.3", "0.6.2"), ("0.3", "0.3.0"), ("0.1", "0.3.0"), ("0.9.9", "0.9.0"), ("1", "0.9.0")],
)
def test_a_version_is_the_last_of_its_series_or_the_latest_before_it(version: str, known: str) -> None:
    """0.6 names the last 0.6; 0.6.3 behaves as the release before it; what is older than all as the first."""
    assert nearest(version, ("0.3.0", "0.6.0", "0.6.2", "0.6.4", "0.9.0")) == known


def test_versions_compare_as_numbers() -> None:
    """0.10 is later than 0.9; a post-release is the release."""
    assert at_least("0.10.0", "0.9.10")
    assert not at_least("0.9.10", "0.10.0")
    assert numbers("2.7.4.post1") == (2, 7, 4)
    assert torch.nearest("2.4") == "2.13"


def test_a_loop_without_settings_is_bf16_with_foreach_adamw_and_sdpa() -> None:
    """The checkpoint's type, torch's default implementation on CUDA, Transformers' default attention; no accumulation,
    nothing recomputed, nothing sharded on one GPU."""
    s = job()
    assert (s.precision, s.optimizer, s.optimizer_impl, s.attention) == ("bf16", "adamw", "foreach", "sdpa")
    assert (s.sharding, s.checkpointing, s.accumulation, s.grad_dtype) == ("none", "none", 1, "bf16")
    assert job(gpus=4).sharding == "ddp"


def test_a_fused_loss_has_chunks_of_so_many_tokens_as_there_are_at_most() -> None:
    assert torch.loss_path(job(loss="fused", loss_chunk_size=1024, seq_len=4096)) == Path("fused", tile=1024)
    assert torch.loss_path(job(loss="fused", loss_chunk_size=1024, seq_len=512)) == Path("fused", tile=512)
    assert torch.loss_path(job(loss="fused", seq_len=4096)) == Path("fused")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"loss": "full"}, "loss full"),
        ({"loss": "fused", "trainer": "ms-swift"}, "trainer ms-swift"),
        ({"loss": "fused", "framework": "trl"}, "framework trl"),
    ],
)
def test_chunks_are_those_of_a_fused_loss_of_your_own_loop(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ScenarioError, match=f"loss_chunk_size: given 1024 with {named}, allowed: null, or with"):
        job(**fields, loss_chunk_size=1024)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"checkpointing": "none"}, "given 8 with checkpointing none, allowed: null, or with checkpointing full"),
        ({"trainer": "ms-swift"}, "given 8 with trainer ms-swift, allowed: null, or with trainer own"),
        ({"method": "lora"}, "given 8 with method lora, allowed: null, or with method full"),
        ({"offload__activations": True}, "given 8 with offload.activations, allowed: null; not modelled there"),
        ({"checkpointed_layers": 99}, "given 99, allowed: 32 at most, all of its layers"),
    ],
)
def test_some_layers_alone_run_again_where_that_is_modelled(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ScenarioError, match=f"checkpointed_layers: {line}"):
        job(**{"checkpointing": "full", "checkpointed_layers": 8} | fields)


@pytest.mark.parametrize(("optimizer", "impl"), [("adamw", "foreach"), ("lion", "single"), ("adafactor", "single")])
def test_each_optimizer_has_its_own_default_implementation(optimizer: str, impl: str) -> None:
    """`_default_to_fused_or_foreach` for Adam and SGD; `_adafactor.py` and lion-pytorch go one by one unless asked."""
    assert job(optimizer=optimizer).optimizer_impl == impl


@pytest.mark.parametrize(
    ("fields", "precision", "grad", "impl"),
    [
        ({"sharding": "zero2"}, "mixed", "bf16", "fused"),
        ({"sharding": "fsdp2"}, "bf16", "bf16", "foreach"),
        ({"sharding": "fsdp2", "precision": "fsdp-mixed"}, "fsdp-mixed", "fp32", "foreach"),
        ({"sharding": "ddp", "precision": "autocast"}, "autocast", "fp32", "foreach"),
    ],
)
def test_gradients_have_the_type_of_what_is_stepped(
    fields: dict[str, Any], precision: str, grad: str, impl: str
) -> None:
    """`.grad` has the parameter's type, a reduced shard that of the fp32 shard; DeepSpeed keeps bf16, steps fused."""
    s = job(gpus=4, **fields)
    assert (s.precision, s.grad_dtype, s.optimizer_impl) == (precision, grad, impl)


@pytest.mark.parametrize(("sharding", "dtype"), [("ddp", "fp32"), ("fsdp2", "fp32"), ("zero3", "bf16")])
def test_adapters_are_fp32_unless_deepspeed_casts_them(sharding: str, dtype: str) -> None:
    """PEFT's `autocast_adapter_dtype`; DeepSpeed's engine calls `module.bfloat16()`."""
    s = job(gpus=4, sharding=sharding, method="lora")
    assert s.lora is not None
    assert (s.lora.dtype, s.lora.rank, s.lora.targets, s.lora.dropout) == (dtype, 8, "all-linear", 0)


REFUSED = {
    "fsdp-mixed alone": {"precision": "fsdp-mixed"},
    "zero in bf16": {"gpus": 2, "sharding": "zero2", "precision": "bf16"},
    "offloaded parameters under ddp": {"gpus": 2, "sharding": "ddp", "offload__parameters": True},
    "offloaded parameters under zero2": {"gpus": 2, "sharding": "zero2", "offload__parameters": True},
    "an offloaded optimizer alone": {"offload__optimizer": True},
    "4-bit weights under zero3": {"gpus": 2, "sharding": "zero3", "method": "qlora", "checkpointing": "none"},
    "layers gathered module by module and run again in part": {
        "gpus": 2,
        "sharding": "zero3",
        "checkpointing": "selective",
    },
}


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED)
def test_what_cannot_run_is_refused_in_one_line(fields: dict[str, Any]) -> None:
    """The line names the field, what was given and what is allowed."""
    with pytest.raises(ScenarioError) as caught:
        job(**fields)
    line = str(caught.value)
    assert line.isprintable()
    assert "given" in line and "allowed" in line


@pytest.mark.parametrize(
    ("transformers", "path"),
    [
        # logits cast to fp32 in the model, then in the loss; 4.49 shifts the labels in their place
        ("4.44", Path("cross-entropy", head_fp32=True, shift_copy=True)),
        ("4.46", Path("cross-entropy", shift_copy=True)),
        ("4.48.3", Path("cross-entropy", shift_copy=True)),
        ("4.49", Path("cross-entropy")),
        ("5.23.0", Path("cross-entropy")),
    ],
)
def test_the_models_own_loss_changed_with_transformers(transformers: str, path: Path) -> None:
    """modeling_llama.py and loss_utils.py of each release."""
    assert torch.loss_path(job(versions={"transformers": transformers}, micro_batch=2)) == path


def test_one_sequence_is_shifted_without_a_copy() -> None:
    """`logits[..., :-1, :].contiguous()` of one row is a view: PyTorch ignores the stride of a dimension of one."""
    assert torch.loss_path(job(versions={"transformers": "4.48"})) == Path("cross-entropy")


def test_mistrals_own_class_cast_its_logits_two_releases_longer() -> None:
    """modeling_mistral.py of 4.47.1 has `logits = logits.float()` and the shift, that of 4.48.0 calls the loss."""
    both = [job(model="mistral-7b-v0.1", versions={"transformers": v}) for v in ("4.47", "4.48")]
    assert [torch.loss_path(s).head_fp32 for s in both] == [True, False]


@pytest.mark.parametrize(
    ("model", "release", "cast"),
    [
        ("opt-1.3b", "4.28", ""), ("opt-1.3b", "4.48.2", ""), ("opt-1.3b", "4.48.3", "loss"),
        ("opt-1.3b", "4.48", "loss"), ("gpt2", "4.40", ""), ("falcon-40b", "4.34", ""), ("mpt-7b", "4.47", ""),
        ("pythia-1b", "4.48", ""), ("pythia-1b", "4.49", "loss"), ("llama-2-7b", "4.30", ""),
        ("llama-2-7b", "4.31", "model"), ("llama-2-7b", "4.46", "loss"), ("starcoder2-3b", "4.46", "model"),
        ("starcoder2-3b", "4.47", "loss"), ("granite-3.1-8b", "4.47", "model"), ("granite-3.1-8b", "4.48", "loss"),
        ("baichuan2-7b", "4.34", ""), ("baichuan2-7b", "4.57", ""),
    ],
)  # fmt: skip
def test_logits_are_cast_by_the_model_the_loss_or_not_at_all(model: str, release: str, cast: str) -> None:
    """`CrossEntropyLoss` of logits as they are, `logits.float()` and `self.loss_function` of `modeling_<family>.py`."""
    path = torch.loss_path(job(model=model, versions={"transformers": release}))
    assert (path.head_fp32, path.uncast) == (cast == "model", not cast)


def test_other_tasks_have_their_own_paths() -> None:
    """A reward model has no vocabulary; DPO takes log-probabilities as it is told, of all tokens but the first."""
    assert torch.loss_path(job(task="rm")) == Path("scalar")
    kept = 1023 / 1024
    assert torch.loss_path(job(task="dpo", seq_len=1024)) == Path("log-softmax", upcast=True, kept=kept)
    assert torch.loss_path(job(task="dpo", seq_len=1024, logprob="selective")) == Path("selective", kept=kept)
    assert torch.loss_path(job(loss="chunked")) == Path("chunked")


def test_a_policy_with_adapters_is_its_own_reference() -> None:
    """`disable_adapter()`, unless the reference is another model or lies elsewhere."""
    assert torch.keeps(job(task="dpo", method="lora")).role("reference").shares
    assert not torch.keeps(job(task="dpo")).role("reference").shares
    other = {"reference": {"model": "llama-3.2-1b"}}
    assert not torch.keeps(job(task="dpo", method="lora", roles=other)).role("reference").shares


def test_deepspeed_is_there_for_zero_alone() -> None:
    """With the configuration's own defaults."""
    keeps = torch.keeps(job(gpus=2, sharding="zero3"))
    assert keeps.deepspeed is not None
    assert (keeps.deepspeed.reduce_bucket, keeps.deepspeed.max_live) == (500_000_000, 1_000_000_000)
    assert torch.keeps(job(gpus=2, sharding="fsdp2")).deepspeed is None
