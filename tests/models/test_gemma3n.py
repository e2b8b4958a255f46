"""Gemma 3n: a residual stream of four, layers that compute on the first, sparse gates, and borrowed keys."""

from __future__ import annotations

from typing import Any

import pytest
from architectures import published, tiny

from calc.base.plan import Path
from calc.memory.activations import Program
from calc.memory.run import Run, dimensions
from calc.models.architecture import ConfigError, LayerSpec, layer_tensors, parameters, tensors
from calc.step.compiled_model import stack


def gemma(**fields: Any) -> Any:
    return tiny("gemma3n_text", **{"num_key_value_heads": 2, "num_kv_shared_layers": 1, **fields})


def test_a_layer_predicts_and_corrects_four_streams_by_a_router_of_the_first() -> None:
    """`Gemma3nTextAltUp`, `Gemma3nTextLaurelBlock` of E2B: 4 streams of 2048, a rank of 64."""
    found = {
        t.name.partition(".*.")[2].removesuffix(".weight"): t.shape
        for t in layer_tensors(published("gemma-3n-e2b"), LayerSpec())
    }
    assert found["altup.correction_coefs"] == (4, 4)
    assert found["altup.prediction_coefs"] == (16, 4)
    assert found["altup.modality_router"] == (4, 2048)
    assert (found["laurel.linear_left"], found["laurel.linear_right"]) == ((64, 2048), (2048, 64))
    assert found["altup.correct_output_scale"] == found["altup.router_norm"] == (2048,)
    outside = {
        t.name: t.count for t in tensors(published("gemma-3n-e2b")) if "altup" in t.name and "layers" not in t.name
    }
    assert outside == {"model.altup_projections.*.weight": 3, "model.altup_unembed_projections.*.weight": 3}


@pytest.mark.parametrize(("model", "count"), [("gemma-3n-e2b", 4_435_182_688), ("gemma-3n-e4b", 6_835_235_568)])
def test_parameters_are_those_of_transformers_own_model(model: str, count: int) -> None:
    """Counted in `Gemma3nForCausalLM` of Transformers 5.23."""
    assert parameters(published(model)) == count


def test_checkpoints_are_of_all_streams() -> None:
    """Each of 4 streams of 2048 in bf16."""
    run = Run(published("gemma-3n-e2b"))
    kept = stack(run, Path("cross-entropy"), masked=False, trained=0, checkpointing="full").residual
    assert kept.bytes(1000, 0) == 1000 * 4 * 2 * 2048


def test_only_sparse_layers_cut_their_gates_off() -> None:
    """The deviation keeps the gates and the cut keeps its output, 2i each a token, beside what other layers keep."""
    arch = published("gemma-3n-e2b")
    assert [n for n, spec in enumerate(arch.specs) if spec.sparse] == [*range(10)]
    dims = dimensions(arch)
    own, usual = (
        sum(c * dims.get(s, 1) for s, c in Program(Run(arch), LayerSpec(sparse=sparse)).layer().saved().tokens.items())
        for sparse in (True, False)
    )
    assert own - usual == 2 * dims["i"] + 2


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"activation_sparsity_pattern": [0.95]}, "activation_sparsity_pattern: given [0.95], allowed: a list of"),
        ({"altup_active_idx": 1}, "altup_active_idx: given 1, allowed: 0 for the family gemma3n_text; not modelled"),
        ({"altup_correct_scale": False}, "altup_correct_scale: given False, allowed: true"),
        ({"intermediate_size": [32, 64]}, "intermediate_size: given [32, 64], allowed: a positive integer"),
    ],
)
def test_what_is_not_modelled_is_refused(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        gemma(**fields)
    assert str(caught.value).startswith(line)


def test_a_list_of_equal_widths_and_the_shares_of_a_file_are_read() -> None:
    arch = gemma(intermediate_size=[64] * 2, num_hidden_layers=2, activation_sparsity_pattern=[0.95, 0.0])
    assert arch.intermediate == 64
    assert [spec.sparse for spec in arch.specs] == [True, False]


def test_what_is_no_number_is_no_width_of_the_layers_own_inputs() -> None:
    """Once an empty list was none, and estimates failed for want of a dimension."""
    with pytest.raises(ConfigError, match=r"hidden_size_per_layer_input.*a number, 0 or more, or null"):
        gemma(hidden_size_per_layer_input=[])
