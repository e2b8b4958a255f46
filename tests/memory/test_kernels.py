"""Kernels in place of a model's own operations: what a layer keeps for backward with them, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
from formulas import form, terms
from jobs import job
from tapes import arch, backward_of, frozen, passing, tape

from calc.autograd.lifetimes import Lifetimes
from calc.autograd.tape import total
from calc.base.plan import Path
from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.frameworks.torch.torch import loss_path
from calc.memory.projector import projector
from calc.memory.run import Adapter, Run, dimensions
from calc.memory.vision import block, running
from calc.models.families import FAMILIES, SEEING
from calc.models.kernels import LIGER, LIGER_TOWERS, replaced
from calc.resolve.parse import parse
from calc.scenario.scenario import ScenarioError


def liger(model: str, **run: Any) -> dict[str, Any]:
    """The settings of a run of `model` with Liger's kernels."""
    return {**run, "replaced": replaced("liger", arch(model).family)}


@pytest.mark.parametrize(
    ("model", "run", "kept"),
    [
        # A norm keeps its input, 2h, and a number, 4; q, k, v, o 2q + 4kv + 2q and a log-sum-exp, 4H; gate and up with
        # their product 6i. Trained linears keep the norms' outputs, 2h each: in all 16h - 8h and 8i - 2i.
        ("llama-3-8b", {}, "8h + 4q + 4kv + 6i + 4H + 8"),
        # norms of queries and keys: their inputs, and a number a head
        ("qwen3-8b", {}, "8h + 6q + 6kv + 6i + 8H + 4K + 8"),
        # four norms, two of them behind the blocks, whose inputs nothing else keeps
        ("gemma-2-9b", {}, "12h + 4q + 4kv + 6i + 4H + 16"),
        # slices are copied: the product of q, k and v stays for v's view, as do gate's and up's own copies
        ("phi-3-mini", {}, "8h + 6q + 6kv + 6i + 4H + 8"),
        # frozen linears keep nothing: two norms' inputs, attention, gate and up
        ("llama-3-8b", frozen(), "4h + 4q + 4kv + 4i + 4H + 8"),
    ],
)
def test_a_layer_keeps_what_its_kernels_save(model: str, run: dict[str, Any], kept: str) -> None:
    """Counted in liger-kernel 0.8.5 `ops/{rms_norm,rope,swiglu,geglu}.py`: `ctx.save_for_backward`."""
    assert terms(tape(model, **liger(model, **run)).saved(), arch(model)) == form(kept)


def test_the_kernel_of_apertus_activation_keeps_its_input_and_returns_its_type() -> None:
    """A frozen layer: of the MLP the product of up, 2i, alone; without it xIELU keeps 5 bytes more and makes fp32."""
    run = frozen(precision="autocast-bf16")
    kept = {
        library: terms(tape("apertus", **run, replaced=replaced(library, "apertus")).saved(), arch("apertus"))[0]
        for library in ("eager", "xielu")
    }
    assert kept["xielu"]["i"] == 2 < kept["eager"]["i"]
    assert "activation" not in replaced("xielu", "llama")
    job = {"model": "apertus-8b", "task": "sft", "gpu": "h200"}
    notes = {kernels: " ".join(estimate(parse(job | {"kernels": kernels})).notes) for kernels in ("eager", "xielu")}
    assert "kernels xielu says how much" in notes["eager"] and "xielu" not in notes["xielu"]


def test_the_plugin_of_fms_acceleration_leaves_the_mlp_alone() -> None:
    """Llama 3 8B with Liger's norms and rotation, and its own MLP, which also keeps the activation: 2i.

    Counted in fms_acceleration_foak 0.3.2 `kernels/unsloth/{rms_layernorm,rope_embedding}.py`.
    """
    kept = tape("llama-3-8b", replaced=replaced("foak", "llama")).saved()
    assert terms(kept, arch("llama-3-8b")) == form("8h + 4q + 4kv + 8i + 4H + 8")
    assert not replaced("foak", "qwen3")


def test_the_norms_that_automodel_compiles_leave_all_else_as_it_is() -> None:
    """What the plugin of fms-acceleration keeps: a norm's input, and a number a row of each norm."""
    kept = tape("llama-3-8b", replaced=replaced("automodel", "llama")).saved()
    assert terms(kept, arch("llama-3-8b")) == form("8h + 4q + 4kv + 8i + 4H + 8")
    job = {"model": "llama-3-8b", "task": "sft", "gpu": "h200", "kernels": "automodel"}
    assert parse(job).kernels == "automodel"
    for other in ({"trainer": "transformers"}, {"framework": "trl"}, {"model": "qwen3-8b"}):
        with pytest.raises(ScenarioError, match="kernels: given 'automodel'"):
            parse(job | other)


@pytest.mark.parametrize(("rows", "copied"), [(1, False), (4, True)])
def test_the_plugins_cross_entropy_writes_its_gradient_over_shifted_fp32_logits(rows: int, *, copied: bool) -> None:
    """`FastForCausalLMLoss` (0.7.2 `kernels/unsloth/cross_entropy_loss.py`): a single row is a view."""
    job = {"model": "llama-3-8b", "task": "sft", "gpu": "h200", "seq_len": 512, "micro_batch": rows, "loss": "full"}
    s = parse(job | {"trainer": "transformers", "kernels": "foak"})
    assert loss_path(s) == Path("flash", head_fp32=True, shift_copy=copied, in_place=True)
    with pytest.raises(ScenarioError, match="kernels: given 'foak'"):
        parse(job | {"model": "qwen3-8b", "kernels": "foak"})


def test_routed_experts_stay_as_they_are_beside_the_norms_kernels() -> None:
    """Qwen3's norms cast nothing: of each of four inputs two bytes stay in place of four."""
    a, run = arch("qwen3-30b-a3b"), frozen()
    plain, own = (
        terms(tape("qwen3-30b-a3b", moe=True, **r).saved(), a)[0] for r in (run, liger("qwen3-30b-a3b", **run))
    )
    assert {s: plain[s] - own[s] for s in plain if plain[s] != own[s]} == {"h": 4, "q": 2, "kv": 2}


def test_gradients_are_written_over_what_kernels_have_saved() -> None:
    """Of gate and up over themselves, of a norm's and a rotation's input over the output's: no tensor beside them.

    While the gate's kernel runs backward, its incoming gradient, 2i, and the stream's, 2h, pass; nothing else.
    """
    found = passing("llama-3-8b", backward_of(tape("llama-3-8b", **liger("llama-3-8b"))))
    assert found["mlp: gate"] == form("2h + 2i")
    # queries' gradient 2q lies where attention has made it, keys' and values' 4kv beside it
    assert found["q: rotate"] == form("2h + 2q + 4kv")
    assert "q: heads" not in found


def test_a_checkpointed_layer_recomputes_less_with_kernels() -> None:
    def most(**run: Any) -> float:
        turns = Lifetimes(tape("llama-3-8b", **run)).again.turns
        sizes = [total([*turn.saved, *turn.passing]) + turn.scratch for turn in turns]
        return max(sum(c * dims[s] for s, c in size.tokens.items() if s in dims) for size in sizes)

    dims = dimensions(arch("llama-3-8b"))
    assert most(**liger("llama-3-8b")) < most() - 2 * dims["i"]


def test_adapters_read_the_norms_output_that_no_cast_has_made() -> None:
    a = arch("llama-3-8b")
    run = frozen(Adapter(64, ("q_proj",), False, 2))
    plain, own = (terms(tape("llama-3-8b", **r).saved(), a)[0] for r in (run, liger("llama-3-8b", **run)))
    assert {s: plain[s] - own[s] for s in ("h", "i")} == {"h": 4, "i": 2}


def test_the_families_are_known_ones() -> None:
    assert set(LIGER) <= {*FAMILIES, *SEEING}
    assert set(LIGER_TOWERS) <= set(LIGER) & set(SEEING)
    assert replaced("eager", "llama") == frozenset() == replaced("liger", "falcon")
    moe = {m.architecture.family for m in load().models.values() if m.architecture.experts}
    # dense layers and shared experts have the kernel, routed experts one that is not computed
    shared = {m.architecture.family for m in load().models.values() if m.architecture.shared_experts}
    dense = {m.architecture.family for m in load().models.values() if not m.architecture.experts}
    assert {family for family in moe & set(LIGER) if "gate" in LIGER[family]} <= shared | dense


def test_the_blocks_of_a_vision_tower_have_the_norms_that_liger_patches_and_no_more() -> None:
    """Counted for Qwen2.5-VL: each of two norms keeps its input, 2h a patch, in place of 4h in fp32 and 2h normalised.

    liger-kernel 0.8.5 `apply_liger_kernel_to_qwen2_5_vl` patches `vision_block.norm1` and `norm2`; the tower's MLP and
    rotation, and the projector's norm, run as Transformers'.
    """
    arch, patches = load().models["qwen2.5-vl-3b"].architecture, 1000
    assert arch.vision
    kept = {}
    for library in ("eager", "liger"):
        run = Run(arch, "bf16", "flash", replaced=replaced(library, arch.family))
        own = running(run, arch.vision, trained=True)
        merged = projector(own, arch.vision, arch.vision.merger, first=False)
        kept[library] = [
            part.saved.bytes(patches, 0) for part in (block(own, own.arch.specs[0], first=False, counted=False), merged)
        ]
    (block_eager, projector_eager), (block_liger, projector_liger) = kept.values()
    assert block_eager - block_liger == 2 * 4 * 1280 * patches
    assert projector_eager == projector_liger


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"framework": "slime"}, "kernels: given 'liger' with slime, allowed: eager; not modelled there"),
        (
            {"gpus": 2, "tensor_parallel": 2, "micro_batch": 1},
            "kernels: given 'liger' with tensor_parallel = 2, allowed: eager",
        ),
        (
            {"model": "falcon-40b"},
            "kernels: given 'liger', allowed for the family falcon: eager; Liger has none for it that is modelled",
        ),
        ({"trainer": "torchtune"}, "kernels: given 'liger' with trainer torchtune, allowed: eager"),
    ],
)
def test_kernels_that_cannot_run_are_refused(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ScenarioError) as error:
        job(kernels="liger", **fields)
    assert str(error.value) == f"scenario: {line}"


def test_one_switch_of_the_trainer_has_the_loss_and_the_kernels() -> None:
    """`use_liger_kernel`, `enable_liger_kernel`; Axolotl's plugin has a key for each."""
    for trainer in ("llamafactory", "ms-swift"):
        assert job(trainer=trainer, loss="fused").kernels == "liger"
        assert job(trainer=trainer, kernels="liger").loss == "fused"
        assert job(trainer=trainer, kernels="liger", task="dpo").loss == "full"
    assert job(trainer="axolotl", loss="fused").kernels == "eager"
