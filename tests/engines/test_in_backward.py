"""Optimizers that step in backward: no gradient stays, by hand for Llama 3 8B (P = 8,030,261,248)."""

from __future__ import annotations

from typing import Any

import pytest
from jobs import GATE, LAYER, VH, P, at, end, engine, head, job, moments, norm, top, total

from calc.base.ledger import Line
from calc.base.optimizers import OPTIMIZERS
from calc.engines.replica import Where
from calc.engines.zero_parameters import ZeroParameters
from calc.memory.optimizer import Optimizer, single_step, states, step_scratch
from calc.models.architecture import Tensor
from calc.scenario.scenario import ScenarioError

REDUCE = Where("reduce", 0, True, VH + 4096, 32 * LAYER, VH)


def adamw(**fields: Any) -> Any:
    return engine(optimizer_in_backward=True, **{"optimizer_impl": "foreach"} | fields)


def test_a_gradient_lives_for_its_own_step() -> None:
    """bf16: 2 bytes of the gradient that is made, and foreach's list of one denominator, 2; nothing of those before."""
    e = adamw()
    assert total(e.at(head())) == 2 * VH  # the logits' gradient is still there: the step comes after it
    assert total(e.at(norm())) == 2 * VH + 2 * VH
    assert total(e.at(top())) == 2 * GATE + 2 * GATE
    assert total(e.at(end())) == 2 * VH
    assert {name: total(lines) for name, lines in moments(e, "stepping").items()} == {
        "optimizer step of the embedding": 2 * VH + 2 * VH
    }
    assert total(e.resident(), "optimizer_states") == 4 * P


@pytest.mark.parametrize(("implementation", "temporaries"), [("fused", 0), ("foreach", 1), ("single", 2)])
def test_the_step_of_one_tensor_has_the_temporaries_of_its_implementation(
    implementation: str, temporaries: int
) -> None:
    assert total(adamw(optimizer_impl=implementation).at(top())) == 2 * GATE * (1 + temporaries)


def test_a_tied_heads_gradient_waits_for_the_embeddings() -> None:
    """Llama 3.2 3B, V·h = 128,256 · 3,072: the head's 2 bytes an element lie there until both are summed."""
    e = adamw(model="llama-3.2-3b")
    table = 128_256 * 3072
    assert total(e.at(top(0))) == 2 * table
    assert total(e.at(end())) >= 2 * table
    assert total(moments(e, "stepping")["optimizer step of the embedding"]) == 4 * table


def test_lomo_steps_a_parameter_when_the_next_has_its_gradient() -> None:
    """Beside the next one's 2 bytes: the fp32 copies of gradient and weight, 8. No states; in fp32 no copies.

    lomo_optim 0.1.1 on six bf16 linears, followed on a CPU: a peak of 10 bytes an element of one of them.
    """
    e = engine(optimizer="lomo")
    assert job(optimizer="lomo").optimizer_in_backward
    assert total(e.resident(), "optimizer_states", "master_weights") == 0
    assert total(e.at(top())) == 2 * GATE + 8 * GATE
    assert total(e.at(norm())) == 8 * VH + 2 * norm().making
    assert total(engine(optimizer="lomo", precision="fp32").at(top())) == 4 * GATE + 4 * GATE


def test_lomo_under_zero_3_has_shards_of_weights_alone() -> None:
    """A rank's part of the fp32 weight is small, so that the whole gradient's copy, 4, beside its 2 is the most."""
    e = engine(optimizer="lomo", sharding="zero3", gpus=8, global_batch=8)
    assert isinstance(e, ZeroParameters)
    assert total(e.resident(), "weights") == 2 * P // 8
    assert total(e.resident(), "master_weights", "optimizer_states", "gradients") == 0
    assert at(e.resident(), "communication#zero-3") == total(e.states())  # norms stay whole, and no bucket
    assert at(e.at(top()), "optimizer#in-backward") == 6 * GATE
    assert [*moments(e, "stepping")] == ["optimizer step of the embedding"]


def test_fsdp_keeps_the_shards_of_one_layer_while_they_step() -> None:
    """Eight ranks: the layer above's shard, 2 bytes, and the largest tensor's denominator; its own gradients whole."""
    e = adamw(gpus=8, global_batch=8, sharding="fsdp2")
    below = Where("layer", 15, True, VH + 4096, 16 * LAYER, LAYER)
    shard = [line for line in e.at(below) if line.source in ("gradients#accumulation", "optimizer#in-backward")]
    assert sorted(line.bytes for line in shard) == [2 * GATE // 8, 2 * LAYER // 8]
    assert at(e.at(REDUCE), "optimizer#in-backward") == 0


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"global_batch": 2}, "global_batch: given 2 with optimizer_in_backward, allowed: one micro batch a GPU, 1"),
        ({"method": "lora"}, "method: given 'lora' with optimizer_in_backward, allowed: full"),
        (
            {"gpus": 2, "sharding": "ddp"},
            "sharding: given 'ddp' with optimizer_in_backward and optimizer adamw, allowed: none, fsdp2",
        ),
        ({"framework": "trl"}, "optimizer_in_backward: given true with trl, allowed: false"),
        (
            {"optimizer": "lomo", "optimizer_in_backward": False},
            "optimizer_in_backward: given false with optimizer lomo, allowed: true, as it steps no other way",
        ),
    ],
)
def test_what_cannot_step_in_backward_is_refused(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(ScenarioError) as error:
        job(**{"optimizer_in_backward": True} | fields)
    assert str(error.value) == f"scenario: {line}"


TENSORS = (
    Tensor("w", (1024, 1024), 1, "linear", "mlp"),
    Tensor("n", (1024,), 1, "norm", "norm"),
    Tensor("e", (4096, 512), 1, "embedding", "embed"),
)


def state(kind: str, **how: bool) -> Line:
    elements = sum(t.elements * t.count for t in TENSORS)
    return states(Optimizer(kind, "foreach", **how), "actor", elements, 2, TENSORS)


def test_states_of_fewer_bits_by_hand() -> None:
    """A matrix of 2^20 and an embedding of 2^21 elements; the norm's 1,024 stay as they are, in bf16.

    torchao: a byte and an fp32 scale for 256, twice; no exception for embeddings.
    """
    packed = 2**20 + 2**21
    assert state("adamw-torchao-8bit").bytes == 2 * (packed + 4 * packed // 256) + 2 * 2 * 1024
    assert state("adamw-torchao-8bit", by_trainer=True) == state("adamw-torchao-8bit")
    assert state("adamw-8bit", by_trainer=True).bytes > state("adamw-8bit").bytes
    paged = state("adamw-paged")
    assert (paged.bytes, paged.allocated) == (8 * (packed + 1024), False)  # fp32 beside bf16 weights


def test_torchaos_step_takes_both_moments_of_a_tensor_in_fp32() -> None:
    """Compiled by torch 2.13 for a CPU the step of a 512 x 512 parameter has two fp32 buffers of its size."""
    one = Optimizer("adamw-torchao-8bit", "foreach")
    assert step_scratch(one, "actor", P, VH, 2).bytes == 8 * VH == single_step(one, "actor", VH, 2, 2).bytes
    assert OPTIMIZERS["adamw-torchao-8bit"].bits == 8 and OPTIMIZERS["adamw-8bit"].in_bits == " in 8 bits"
