"""Arguments of Megatron-LM's tests read as a model and as the last rank's part of it."""

from __future__ import annotations

from typing import Any

import pytest

from calc.accuracy.megatron_golden import architecture, golden, pieces, routes
from calc.models.architecture import parameters

GPT: dict[str, Any] = {
    "num-layers": 12, "hidden-size": 512, "num-attention-heads": 8, "max-position-embeddings": 1024,
    "tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 4, "transformer-impl": "transformer_engine",
    "micro-batch-size": 4, "global-batch-size": 32, "seq-length": 1024, "untie-embeddings-and-output-weights": True,
    "disable-bias-linear": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "last"),
    [
        ({}, (3,)),
        ({"num_layers_per_virtual_pipeline_stage": 1}, (1, 1, 1)),
        ({"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 2,
          "num_layers_per_virtual_pipeline_stage": 1}, (1, 1)),
        ({"num_layers": 16, "num_virtual_stages_per_pipeline_rank": 4}, (1, 1, 1, 1)),
        # (6 + embedding + loss) / 4 stages / 2 pieces: the last piece is the loss alone
        ({"num_layers": 6, "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True,
          "num_virtual_stages_per_pipeline_rank": 2}, (1, 0)),
        # eight pieces: two layers in the fourth, one with a depth and the loss in the eighth
        ({"num_layers": 14, "pipeline_model_parallel_layout": "Et*2|(tt|)*5t|tmL"}, (2, 1)),
        ({"num_layers": 15, "pipeline_model_parallel_layout": "Et*3|(tt|)*6L"}, (2, 0)),
    ],
    ids=["even", "pieces", "uneven", "virtual stages", "embedding and loss take a place", "layout", "loss alone"],
)  # fmt: skip
def test_layers_of_the_last_stages_pieces(fields: dict[str, Any], last: tuple[int, ...]) -> None:
    own = {name.replace("_", "-"): value for name, value in fields.items()}
    assert pieces(GPT | own, 4) == last


def test_a_piece_with_the_loss_alone_has_an_estimate() -> None:
    """More than its weights, gradients, masters and moments, 6 and 12 over two ranks, of two layers and the head."""
    a = GPT | {"num-layers": 15, "pipeline-model-parallel-layout": "Et*3|(tt|)*6L", "bf16": True}
    record = {"id": "", "source": "", "max_allocated_bytes": 1, "gpus": 8, "arguments": a}
    held = (2 * 12 * 512**2 + 50_304 * 512) * (6 + 12)
    assert held < golden(record).predicted < 20 * held


def test_a_depth_has_a_layer_two_norms_what_joins_them_and_a_last_norm() -> None:
    """12·512² and two norms of a layer, 2·512² for both streams, three norms more, each of 2·512."""
    more = parameters(architecture(GPT | {"mtp-num-layers": 1})) - parameters(architecture(GPT))
    assert more == (12 + 2) * 512**2 + 5 * 2 * 512


def test_heads_can_be_wider_than_their_share_of_the_stream() -> None:
    """Per layer 4·512 weights for each of 8 heads' 64 more channels."""
    more = parameters(architecture({**GPT, "kv-channels": 128})) - parameters(architecture(GPT))
    assert more == 12 * 4 * 512 * 8 * 64


def test_layers_are_dense_or_routed_as_their_frequency_says() -> None:
    experts = {**GPT, "num-experts": 8, "moe-ffn-hidden-size": 1024, "moe-layer-freq": "([0]*1+[1]*11)"}
    assert routes(experts) == (False, *[True] * 11)
    assert routes({**experts, "moe-layer-freq": 2}) == (True, False) * 6
    assert [spec.mlp for spec in architecture(experts).specs[:2]] == ["dense", "experts"]


def test_a_shared_expert_is_an_mlp_of_each_routed_layer() -> None:
    experts = {**GPT, "num-experts": 8, "moe-ffn-hidden-size": 1024}
    shared = architecture({**experts, "moe-shared-expert-intermediate-size": 512})
    assert parameters(shared) - parameters(architecture(experts)) == 12 * 2 * 512 * 512
