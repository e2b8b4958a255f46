"""Instants for readers: what a page and the terminal call them; records and programs keep the code's names."""

from __future__ import annotations

import pytest

from calc.estimate.estimate import estimate
from calc.estimate.report import text
from calc.estimate.wording import spoken
from calc.resolve.parse import parse


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("actor: logits: logits: to fp32", "actor: logits cast to fp32"),  # a cast in the head, not twice the logits
        ("loss: nll", "cross entropy"),
        ("logits: nll: shift", "cross entropy, shift"),
        ("reference, layer: mlp: product", "reference, layer: product of gate and up"),
        ("recompute: up_proj: LoRA scale", "layer, recomputed: up_proj, LoRA scaled"),
        ("prompts: logits: lm_head", "prompts: output head"),
        ("actor: logits: gather", "actor: each token's own logit"),  # of the loss
        ("actor: first layer: gather", "actor: first layer gathered"),  # of the shards
        ("critic: root group flattened", "critic: root FSDP unit flattened"),
        ("embedding", "the embedding's gradient"),
    ],
)
def test_an_operation_is_called_by_what_it_does(name: str, words: str) -> None:
    assert spoken(name) == words


@pytest.mark.parametrize("name", ["optimizer step on the host", "rollout: KV cache allocated", "save", "final norm"])
def test_a_name_that_is_words_stays(name: str) -> None:
    assert spoken(name) == name


def test_the_report_has_words_and_programs_have_names() -> None:
    job = {"model": "llama-3.2-1b", "task": "sft", "framework": "torch", "gpu": "a40", "seq_len": 2048}
    found = estimate(parse(job))
    forward = next(phase for phase in found.groups[0].phases if phase.name == "forward")
    assert forward.moment.name.startswith("logits: ")
    assert spoken(forward.moment.name) in text(found, "A40")
    assert forward.moment.name not in text(found, "A40")
