"""Tensors that layers and losses keep under torch.compile, as AOTAutograd's partitioner saved them in a trace; and
refusals.

The counts are those of torch 2.13's `min_cut_rematerialization_partition` with Inductor's decompositions, over a layer
of torchtitan 0.2.2 and of Transformers 5.23 in bf16; float8 with torchao 0.9's Float8Linear in it.
"""

from __future__ import annotations

from typing import Any

import pytest
from tapes import arch

from calc.base.ledger import Line
from calc.base.plan import Path
from calc.engines.replica import Where
from calc.estimate.estimate import estimate
from calc.frameworks.torch.torch import loss_path
from calc.frameworks.torch.trainers import torchtitan, torchtune
from calc.memory.activations import layer, program
from calc.memory.loss import head
from calc.memory.run import Adapter, Narrow, Run
from calc.resolve.parse import parse
from calc.scenario.scenario import ScenarioError
from calc.step.placement import engine, replica

JOB: dict[str, Any] = {
    "model": "llama-3.1-8b", "task": "pretrain", "framework": "torch", "trainer": "torchtitan", "gpu": "h100-sxm",
    "gpus": 8, "micro_batch": 1, "seq_len": 8192, "loss": "full", "versions.torchtitan": "0.2.2",
}  # fmt: skip


def kept(model: str, **how: Any) -> int:
    """Bytes a token that a compiled layer keeps for backward."""
    own = arch(model)
    return int(layer(Run(own, compiled=True, **how), own.specs[0].shapes).saved.tokens)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        # 8h + 4q + 4kv + 6i + 4H + 8: input, norms' outputs, o_proj's, q, k, v, attention, gate, up, product
        ("llama-3-8b", 8 * 4096 + 4 * 4096 + 4 * 1024 + 6 * 14336 + 4 * 32 + 8),
        ("qwen2.5-7b", 8 * 3584 + 4 * 3584 + 4 * 512 + 6 * 18944 + 4 * 28 + 8),
        # and queries and keys before their norms, with a scale for each head
        ("qwen3-8b", 8 * 4096 + 6 * 4096 + 6 * 1024 + 6 * 12288 + 4 * 32 + 8 + 4 * 40),
    ],
)
def test_a_compiled_layer_keeps_what_the_partitioner_saves(model: str, expected: int) -> None:
    assert kept(model) == expected


def test_torchtunes_own_layer_keeps_what_a_trace_of_it_did() -> None:
    """Protects torchtune 0.4.0's layer of Llama 3.2 3B, keys and values copied for each of 24 heads, rows packed.

    Eager, traced on fake tensors: 140,392 bytes a token, 1,024 of them the tables picked for queries and for keys.
    Compiled, the partitioner keeps the tokens' positions in the tables' place, 8 bytes that all layers share.
    """
    own = torchtune.modelled(arch("llama-3.2-3b"), "0.4.0", packing=True)
    eager, fused = (layer(Run(own, compiled=on), own.specs[0].shapes).saved.tokens for on in (False, True))
    assert eager == 140_392
    assert fused == 8 * 3072 + 8 * 3072 + 6 * 8192 + 4 * 24 + 8
    loose = torchtune.modelled(arch("llama-3.2-3b"), "0.4.0", packing=False)
    assert layer(Run(loose), loose.specs[0].shapes).saved.tokens == 140_392 - 1024
    # since 0.5.0 both norms keep in fp32 what their weight multiplies: 2h more each (measured in 0.6.1 on an H200)
    later = torchtune.modelled(arch("llama-3.2-3b"), "0.6.1", packing=True)
    assert layer(Run(later), later.specs[0].shapes).saved.tokens == 140_392 + 2 * 2 * 3072


def test_torchtunes_recipes_for_all_weights_leave_a_whole_loss_uncompiled() -> None:
    """`training.compile_loss` returns what it compiles, and only recipes for adapters on one GPU take it."""
    job = {"model": "llama-3.2-3b", "task": "sft", "framework": "torch", "trainer": "torchtune", "gpu": "h100-sxm",
           "compile": "model-and-loss"}  # fmt: skip

    def compiled(**fields: Any) -> bool:
        return loss_path(parse({**job, **fields})).compiled

    assert not compiled(loss="full") and compiled(loss="chunked")
    assert compiled(loss="full", method="lora") and not compiled(loss="full", method="lora", gpus=2)


def test_torchtitans_own_layer_keeps_a_norms_input_as_it_is() -> None:
    """Of Llama 3 8B a token: 8h + 4q + 4kv + 8i + 4H + 8, with a kernel for each norm and nothing of a rotation.

    The stream twice, both norms' outputs and o_proj's input in bf16; q, k, v, gate, its activation, up, their product;
    a log-sum-exp a head, a scale a norm. Seen on an H200 to 2 MB of 32 layers (`measurements/h200-torchtitan-*.jsonl`).
    """
    own = torchtitan.modelled(arch("llama-3-8b"), "0.2.2", "2.11")
    expected = 8 * 4096 + 4 * 4096 + 4 * 1024 + 8 * 14336 + 4 * 32 + 8
    assert layer(Run(own), own.specs[0].shapes).saved.tokens == expected


def test_adapters_read_what_is_kept_and_keep_their_rank_s_numbers() -> None:
    """Seven linears, 2·r each; a trace with rank 16 saved 32 bytes a token and adapter beside what full training keeps.

    A scaled product shares its storage with the sum that is made of it (Inductor's `addmm`).
    """
    lora = Adapter(16, "all-linear", dropout=False, b=2)
    assert kept("llama-3-8b", trained=False, adapter=lora) - kept("llama-3-8b") == 7 * 2 * 16
    own = arch("llama-3-8b")
    tape = program(Run(own, compiled=True, trained=False, adapter=lora), own.specs[0].shapes).layer()
    (added,) = [op for op in tape.ops if op.name == "down_proj: LoRA add"]
    assert added.outs[0].storage is added.inputs[0].storage


def test_float8_linears_have_their_inputs_made_again() -> None:
    """The two norms' outputs and the MLP's product are cast where they are made, and again in backward."""
    assert kept("llama-3-8b") - kept("llama-3-8b", narrow="float8") == 4 * 4096 + 2 * 14336


@pytest.mark.parametrize(
    ("model", "h", "i"),
    [("llama-3-8b", 4096, 14336), ("qwen3-8b", 4096, 12288), ("qwen2.5-7b", 3584, 18944)],
)
def test_mxfp8_linears_keep_their_inputs_by_columns(model: str, h: int, i: int) -> None:
    """33 bytes for 32 elements of both norms' outputs and of the MLP's product; attention keeps its own output.

    torchao 0.18's MXFP8Linear in a layer of h = q = 1024, kv = 256, i = 3584, 8 heads: 29,400 bytes a token saved.
    """
    assert kept(model) - kept(model, narrow="mxfp8") == (2 * 2 * h + 2 * i) - 33 * (2 * h + i) // 32
    h, q, kv, i, heads = 1024, 1024, 256, 3584, 8
    assert 4 * h + 4 * q + 4 * kv + 4 * i + 4 * heads + 8 + 33 * (2 * h + i) // 32 == 29_400


def test_nvfp4_linears_keep_inputs_and_weights_by_columns() -> None:
    """9 bytes for 16 elements (torchao 0.18 nvfp4_linear.py:122, `save_for_backward`): attention's output, too."""
    own = arch("llama-3-8b")
    saved = layer(Run(own, compiled=True, narrow="nvfp4"), own.specs[0].shapes).saved
    both = 4 * 4096 + 4 * 4096 + 4 * 1024 + 4 * 14336 + 4 * 32 + 8
    assert saved.tokens == both + 9 * (3 * 4096 + 14336) / 16
    assert saved.fixed == 9 * 218_103_808 / 16  # the seven linears of a layer


def test_selective_checkpointing_knows_mxfp8_products_and_not_those_of_nvfp4() -> None:
    """A trace with torchtitan 0.3's policy: 11,808 bytes a token in bf16, and but for scales in MXFP8, 2,080 in NVFP4.

    There h = q = 1024, kv = 256, i = 3584 and 8 heads: `_scaled_mm_v2` is not among the policy's operators.
    """
    own = arch("llama-3-8b")
    spec = own.specs[0].shapes
    forms: tuple[Narrow, ...] = ("", "mxfp8", "nvfp4")
    plain, mx, nv = (layer(Run(own, compiled=True, narrow=each), spec, selective=True).kept.tokens for each in forms)
    assert mx == plain == 2 * 4096 + 2 * 1024 + 2 * 4096 + 4 * 32 + 2 * 14336
    assert nv == 2 * 4096 + 4 * 32
    assert (2 * 1024 + 2 * 256 + 2 * 1024 + 4 * 8 + 2 * 3584, 2 * 1024 + 4 * 8) == (11_808, 2_080)


def test_the_last_layers_multiply_in_bf16() -> None:
    """Five of 32 layers keep what selective checkpointing keeps in bf16, the others attention alone."""

    def checkpoints(**narrow: Any) -> int:
        s = parse(JOB | {"gpu": "gb200", "compile": "model", "versions.torchtitan": "0.3"} | narrow)
        [group] = estimate(s).groups
        lines = next(phase.moment.lines for phase in group.phases if phase.name == "backward")
        return sum(line.bytes for line in lines if line.component == "checkpoints")

    bf16, most, none = checkpoints(), checkpoints(float8="nvfp4", bf16_layers_at_end=5), checkpoints(float8="nvfp4")
    assert bf16 - none == 32 * 8192 * (2 * 4096 + 2 * 1024 + 2 * 14336)
    assert most - none == 5 * 8192 * (2 * 4096 + 2 * 1024 + 2 * 14336)


def test_torchtitan_keeps_the_output_of_varlen_attention() -> None:
    """`torch_attn._varlen_attn` is among what its policy saves; the flash-attn package's kernel is not."""

    def kept_by(trainer: str) -> int:
        own = {"trainer": trainer, "attention": "flash", "sharding": "fsdp2", "checkpointing": "selective"}
        s = parse({place: value for place, value in (JOB | own).items() if "versions" not in place})
        [role] = s.keeps.roles
        run = replica(s, role, trained=True).run
        return int(layer(run, run.arch.specs[0].shapes, selective=True).kept.tokens)

    assert kept_by("torchtitan") - kept_by("own") == 2 * 4096 + 4 * 32


def test_selective_checkpointing_drops_the_last_product() -> None:
    """Kept are q, v, gate, and attention with its log-sum-exp, as in eager mode; `down` is not needed."""
    own = arch("llama-3-8b")
    spec = own.specs[0].shapes
    eager, compiled = (layer(Run(own, compiled=on), spec, selective=True).kept.tokens for on in (False, True))
    assert compiled == 2 * 4096 + 2 * 1024 + 2 * 4096 + 4 * 32 + 2 * 14336
    assert eager - compiled == 2 * 4096


@pytest.mark.parametrize("model", ["llama-3-8b", "qwen3-8b", "phi-3-mini"])
def test_compiling_never_takes_more(model: str) -> None:
    """Neither kept for backward nor, with recomputation, at any instant of a layer's backward."""
    own = arch(model)
    eager, compiled = (layer(Run(own, compiled=on), own.specs[0].shapes) for on in (False, True))
    assert compiled.saved.tokens < eager.saved.tokens
    for passes in ("backward", "again", "forward"):
        most = [max(shot.saved.tokens + shot.passing.tokens for shot in getattr(s, passes)) for s in (compiled, eager)]
        assert most[0] <= most[1], passes


def test_nothing_outlives_its_last_use_in_a_compiled_layer() -> None:
    """No Python variable keeps a tensor: the graph's operations all have outputs, and none is held."""
    own = arch("llama-3-8b")
    tape = program(Run(own, compiled=True), own.specs[0].shapes).layer()
    assert tape.ops and all(op.outs for op in tape.ops) and not tape.held


def test_a_compiled_cross_entropy_keeps_its_logits_alone() -> None:
    """Saved: logits in bf16 and two fp32 numbers a position; backward adds one bf16 gradient."""
    own = arch("llama-3-8b")
    segment, _, _ = head(Run(own), Path("cross-entropy", compiled=True))
    vocab, hidden = own.vocab, own.hidden
    assert segment.saved.tokens == 2 * vocab + 8 + 2 * hidden
    most = max(shot.saved.tokens + shot.passing.tokens for shot in segment.backward)
    assert 4 * vocab <= most < 4.2 * vocab


def test_a_compiled_loss_in_chunks_keeps_logits_in_16_bits() -> None:
    """torchtune's eight chunks: 2 bytes an entry in place of the fp32 log-softmax's 4."""
    own = arch("llama-3-8b")
    eager, compiled = (head(Run(own), Path("chunked-logits", compiled=on))[0].saved.tokens for on in (False, True))
    assert eager - compiled == 2 * own.vocab - 8


def test_float8_gathers_one_byte_an_element() -> None:
    """WeightWithDynamicFloat8CastTensor hands FSDP 2 its float8 bits (torchao 0.9 `float8/fsdp_utils.py`)."""

    def layers(*, narrow: bool) -> int:
        s = parse(JOB | {"compile": "model", "float8": "tensorwise", "float8_all_gather": narrow})
        [role] = s.keeps.roles
        lines = engine(s, replica(s, role, trained=True), s.keeps).at(Where("layer", 5, backward=False))
        return sum(line.bytes for line in lines if line.values.get("what") == "layers")

    assert layers(narrow=True) * 2 == layers(narrow=False) == 2 * 2 * 218_112_000


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compile": "model", "model": "gemma-2-9b"}, "modelled for layers as Llama's"),
        ({"compile": "model", "attention": "eager", "trainer": "own"}, "modelled with sdpa, flash"),
        ({"compile": "model", "framework": "trl", "trainer": "transformers", "task": "sft"}, "'model' with trl"),
        (
            {"compile": "model", "trainer": "torchtune", "task": "sft", "method": "lora", "lora.dropout": 0.1},
            "modelled for adapters in bf16 without dropout",
        ),
        ({"float8": "rowwise"}, "float8: given 'rowwise' with compile none, allowed: none; modelled"),
        ({"bf16_layers_at_end": 2}, "bf16_layers_at_end: given 2, allowed: null, or with float8"),
        (
            {"compile": "model", "float8": "nvfp4", "versions.torchtitan": "0.3", "bf16_layers_at_end": 32},
            "allowed: below the model's 32 layers",
        ),
        ({"compile": "model", "float8": "mxfp8", "seq_len": 8200}, "8200 tokens a GPU, allowed: with a multiple of 32"),
        ({"compile": "model", "float8": "nvfp4"}, "'nvfp4' with trainer torchtitan, allowed: none, tensor"),
        ({"compile": "model", "float8": "mxfp8", "trainer": "torchtune"}, "'mxfp8' with trainer torchtune"),
        ({"float8_all_gather": True}, "float8_all_gather: given true, allowed: false, or with float8 tensorwise"),
        ({"compile": "model", "float8": "rowwise", "float8_all_gather": True}, "torchao gathers so with tensorwise"),
    ],
)  # fmt: skip
def test_what_is_not_modelled_is_refused(fields: dict[str, Any], message: str) -> None:
    job = {k: v for k, v in JOB.items() if not (fields.get("framework") and k in ("loss", "versions.torchtitan"))}
    with pytest.raises(ScenarioError) as caught:
        parse(job | fields)
    assert message in str(caught.value)


PARTS = {"tensor_parallel": 4, "sequence_parallel": True, "sharding": "fsdp2", "checkpointing": "full"}


def test_async_tensor_parallelism_takes_a_workspace_outside_the_allocator() -> None:
    """Two pieces of the product that is scattered: 2 · 8192 / 4 · 4096 numbers in bf16."""

    def lines(**how: Any) -> list[Line]:
        [group] = estimate(parse(JOB | PARTS | {"compile": "model"} | how)).groups
        return [line for line in group.peak.moment.lines if not line.allocated and line.component == "communication"]

    assert not lines()
    assert [line.bytes for line in lines(async_tensor_parallel=True)] == [2 * 2 * 8192 * 4096 // 4]


def test_async_tensor_parallelism_never_takes_more_of_the_allocator() -> None:
    plain, within = (
        estimate(parse(JOB | PARTS | {"compile": "model", "async_tensor_parallel": on})).groups[0]
        for on in (False, True)
    )
    assert within.peak.moment.allocated_bytes <= plain.peak.moment.allocated_bytes


def test_async_tensor_parallelism_needs_parts_and_compiled_layers() -> None:
    for fields in ({"compile": "model"}, PARTS):
        with pytest.raises(ScenarioError, match="allowed: false, or with both sequence_parallel and compiled layers"):
            parse(JOB | fields | {"async_tensor_parallel": True})
