"""OPT 350M: norms behind each block, and an embedding that is narrower than the layers."""

from __future__ import annotations

from typing import Any

import pytest
from architectures import published, record, tiny

from calc.base.plan import Path
from calc.memory.activations import Program, below_layers, final_norm
from calc.memory.loss import head
from calc.memory.run import Adapter, Run
from calc.models.architecture import embedding_parameters, parameters, tensors
from calc.models.hf_config import from_config


def opt(**fields: Any) -> Any:
    return from_config({**record("opt-350m")["config"], **fields})


def test_its_tensors_are_those_of_the_checkpoint() -> None:
    """`OPTForCausalLM` of Transformers 5.23: 388 tensors, of which 16 of each of 24 layers; no final norm."""
    arch = published("opt-350m")
    outside = {t.name.removeprefix("model.decoder."): t.shape for t in tensors(arch) if ".layers." not in t.name}
    assert outside == {
        "embed_tokens.weight": (50_272, 512), "embed_positions.weight": (2050, 1024),
        "project_in.weight": (1024, 512), "project_out.weight": (512, 1024),
    }  # fmt: skip
    assert sum(t.count for t in tensors(arch)) == 388
    # 4·(h² + h) of attention, 8h² + 5h of the MLP, 4h of norms, with h = 1024
    assert parameters(arch) == 24 * (12 * 1024**2 + 13 * 1024) + 512 * 50_272 + 1024 * 2050 + 2 * 512 * 1024
    assert embedding_parameters(arch) == 512 * 50_272
    assert parameters(arch, head="scalar") == parameters(arch) + 512


@pytest.mark.parametrize(
    ("fields", "last"),
    [
        ({}, 8 * 2),
        ({"_remove_final_layer_norm": True}, 0),
        ({"do_layer_norm_before": False}, 0),
        ({"word_embed_proj_dim": 4}, 8 * 2 + 8 * 4),
        ({"word_embed_proj_dim": 4, "do_layer_norm_before": False}, 8 * 4),
    ],
)
def test_what_lies_between_layers_and_head(fields: dict[str, Any], last: int) -> None:
    """Weight and bias of a final norm, and a projection without a bias (`OPTDecoder`)."""
    arch = tiny("opt", ffn_dim=12, intermediate_size=None, **fields)
    assert arch.final_elements == last
    kept = embedding_parameters(arch) + arch.narrow * 8 + arch.positions * 8
    assert parameters(arch) - kept - last == 2 * (4 * (64 + 8) + 2 * 96 + 20 + 4 * 8)


def test_a_layer_keeps_as_much_with_its_norms_behind_its_blocks() -> None:
    """Input, both sums or the sum and the other norm's output, and a norm's output that a linear reads: 2h each."""
    behind, before = Run(opt(), training=True), Run(opt(do_layer_norm_before=True), training=True)
    kept = Program(behind, behind.arch.specs[0]).layer().saved()
    assert kept.tokens == Program(before, before.arch.specs[0]).layer().saved().tokens
    assert kept.tokens["h"] == 4 * 2 + 2  # and a byte for both masks of dropout


def test_the_projections_keep_what_they_read() -> None:
    """512 a token below the layers where weights are trained, 1024 above them; adapters alone need neither.

    With checkpointing PEFT makes the embedding's output, 512 wide, a leaf that requires a gradient.
    """
    run = Run(opt())
    assert below_layers(run, recompute=False).tokens == {"e": 2}
    assert Program(run).final_norm().saved().tokens == {"h": 2}
    frozen = Run(opt(), trained=False, adapter=Adapter(8, ("q_proj", "v_proj"), False, 2))
    assert not below_layers(frozen, recompute=False)
    assert below_layers(frozen, recompute=True).tokens == {"e": 2}
    assert not Program(frozen).final_norm().saved()


def test_the_head_reads_what_is_as_wide_as_the_embedding() -> None:
    """Backward of a value head in bf16 keeps 512 numbers a token, those of 1024 where nothing projects them."""
    narrow, wide = (
        head(Run(opt(word_embed_proj_dim=width)), Path("scalar"))[0].saved.bytes(1000, 0) for width in (512, 1024)
    )
    assert (narrow, wide) == (1000 * 2 * 512, 1000 * 2 * 1024)


def test_layers_whose_last_output_goes_to_the_head_as_it_is_keep_it_once() -> None:
    """Norms behind the blocks and no narrower embedding: nothing lies between, and the head keeps what it reads."""
    run = Run(opt(word_embed_proj_dim=1024), training=True)
    assert not Program(run).final_norm().saved()
    assert [shot.saved.tokens for shot in final_norm(run).backward] == [0]
