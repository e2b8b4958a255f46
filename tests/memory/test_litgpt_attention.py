"""litgpt's own model: what a layer keeps, counted by hand, and its peaks as litgpt's own code was traced."""

from __future__ import annotations

from typing import Any

import pytest
from formulas import form, terms
from tapes import arch, backward_of, check, forward_of, passing, small

from calc.accuracy.residuals import peak_allocated
from calc.autograd.tape import Tape
from calc.estimate.estimate import estimate
from calc.frameworks.torch.trainers.litgpt import modelled
from calc.memory.activations import program
from calc.memory.run import Adapter, Run
from calc.models.architecture import Architecture, parameters
from calc.models.lora import lora_parameters
from calc.resolve.parse import parse

QV = ("q_proj", "v_proj")


def layer(a: Architecture, adapter: Adapter, **run: Any) -> Tape:
    return program(Run(a, trained=False, training=True, adapter=adapter, **run)).layer()


def test_values_stay_a_view_of_the_whole_product_where_each_query_has_its_key() -> None:
    """Llama 2 7B, LoRA beside q and v with dropout, bytes a token.

    Norms 2 · (4h + 4); the dropped-out input 2h and its mask h; A's output 2 · 2r, B's 2q + 2kv; rotated q and k
    2q + 2kv; v keeps the product 2q + 4kv; output and log-sum-exp 2q + 4H; gate, its activation and up 6i.
    """
    a = modelled(arch("llama-2-7b"))
    kept = layer(a, Adapter(8, QV, True, 2)).saved()
    assert terms(kept, a) == form("11h + 8q + 8kv + 6i + 4H + 8 + 4r")


def test_keys_and_values_are_written_for_every_query_where_heads_share_them() -> None:
    """Rotated q, k and v, 6q, without the product; all three adapted: nothing is set into zeros, 2q + 4kv less."""
    a = modelled(arch("llama-3-8b"))
    alone = layer(a, Adapter(8, ("v_proj",), False, 2)).saved()
    assert terms(alone, a) == form("10h + 8q + 2kv + 6i + 4H + 8 + 2r")
    every = layer(a, Adapter(8, (*QV, "k_proj"), False, 2)).saved()
    assert terms(every, a) == form("10h + 8q + 6i + 4H + 8 + 6r")


@pytest.mark.parametrize("targets", [("q_proj",), ("v_proj",), QV, ("q_proj", "k_proj", "v_proj")])
def test_backward_makes_the_gradient_of_every_adapter_once(targets: tuple[str, ...]) -> None:
    """Rank times inputs and outputs of each that is adapted, as PEFT would have them; k and v are a quarter of q."""
    a = modelled(arch("llama-3-8b"))
    width = {"q_proj": 4096 + 4096, "k_proj": 4096 + 1024, "v_proj": 4096 + 1024}
    made = backward_of(layer(a, Adapter(8, targets, False, 2)))[-1].gradients
    assert made == 8 * sum(width[name] for name in targets) == lora_parameters(a, 8, targets) // a.layers


def test_adapters_elsewhere_are_as_they_are_beside_any_linear() -> None:
    """Rank times inputs and outputs of o_proj and up_proj; nothing stands beside the product."""
    a = modelled(small("llama"))
    made = layer(a, Adapter(8, ("o_proj", "up_proj"), False, 2))
    assert backward_of(made)[-1].gradients == 8 * (64 + 64 + 64 + 96)
    assert "qkv: LoRA A" not in {s.name for s in forward_of(made)}


def test_rotation_passes_through_fp32_and_is_concatenated() -> None:
    """Beside the product, 2q + 4kv, and copies of queries, keys and values, 6q: two products in fp32 and their sum,
    12q, and the joined halves, 2q; then the sum, 4q, and its cast; then that and what it is joined to.
    """
    a = modelled(arch("llama-3-8b"))
    made = layer(a, Adapter(8, QV, False, 2))
    found = passing("llama-3-8b", forward_of(made))
    check(found, """
        q: rotate = 2h + 22q + 4kv
        q: rotate: to bf16 = 2h + 12q + 4kv
        q: rotate: join = 2h + 10q + 4kv
    """)  # fmt: skip
    [op] = [op for op in made.ops if op.name == "q: rotate"]
    half, whole, freed, cosine, sine, out = op.course
    assert [terms(size, a)[0] for size in (half, whole, cosine, sine)] == [{"q": 1}, {"q": 2}, {"q": 4}, {"q": 4}]
    assert (freed, out) == (0, None)
    # beside what is there of the others: the gradient in fp32, its products with cosine and sine, halves of zeros
    back = passing("llama-3-8b", backward_of(made))
    check(back, "q: rotate = 2h + 20q")


def test_the_head_is_its_own_and_the_parameters_are_the_same_otherwise() -> None:
    falcon = arch("falcon-40b")
    assert parameters(modelled(falcon)) == parameters(falcon) + falcon.vocab * falcon.hidden
    llama = arch("llama-2-7b")
    assert parameters(modelled(llama)) == parameters(llama)


@pytest.mark.parametrize(
    ("model", "micro_batch", "length", "checkpointing", "traced"),
    [
        ("llama-2-7b", 1, 1304, "none", 21_300_000_000),
        ("llama-2-7b", 2, 1304, "none", 29_090_000_000),
        ("llama-2-7b", 4, 1304, "none", 44_670_000_000),
        ("llama-2-13b", 1, 1304, "none", 38_050_000_000),
        ("llama-2-7b", 2, 512, "full", 14_169_597_952),
        ("tinyllama-1.1b", 2, 1024, "none", 6_352_181_760),
        ("tinyllama-1.1b", 2, 1024, "full", 3_066_749_440),
        ("codellama-34b", 1, 512, "none", 75_262_202_368),
        ("falcon-40b", 1, 1079, "none", 96_695_815_168),
        ("falcon-40b", 1, 1079, "full", 85_553_015_808),
    ],
)
def test_the_second_micro_batch_takes_what_litgpts_code_took_when_it_was_traced(
    model: str, micro_batch: int, length: int, checkpointing: str, traced: int
) -> None:
    """litgpt 0.4.0's model, adapters and loss on fake tensors, two micro-batches, the outputs cast as Fabric does.

    The tracer does not take litgpt, whose dependencies bind old releases of PyTorch; these were traced by hand.
    """
    job = {"model": model, "task": "sft", "trainer": "litgpt", "gpu": "h200", "method": "lora", "global_batch": 128}
    lengths = {"micro_batch": micro_batch, "seq_len": length, "checkpointing": checkpointing}
    assert peak_allocated(estimate(parse(job | lengths)), traced=True) == pytest.approx(traced, rel=0.003)
