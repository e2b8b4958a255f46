"""Instants in a reader's words: their names are those of operations in the code, for programs and records."""

from __future__ import annotations

import re

# The role that runs, the part of the model, and the operation on its tape: `actor: loss: logits: to fp32`.
_NAMED = re.compile(r"(?P<who>(?:.*?[:,] )??)(?P<part>first layer|layer|recompute|logits|loss): (?P<operation>.+)")
_PARTS = {"recompute": "layer, recomputed: ", "layer": "layer: ", "logits": "", "loss": ""}
_WHOLE = {
    "first layer: gather": "first layer gathered",
    "layer: gather": "layer gathered",
    "layer: gradients joined": "a layer's gradients joined",
    "root group flattened": "root FSDP unit flattened",
    "embedding": "the embedding's gradient",
}
_OPERATIONS = {
    "lm_head": "output head",
    "gather": "each token's own logit",
    "mlp: product": "product of gate and up",
    "mlp: activation": "activation of the MLP",
    "experts: product": "experts, product of gate and up",
    "experts: unsort": "experts' outputs back in order",
    "score": "value head",
    "logits: gather": "logits gathered from all ranks",
    "logits: divide": "logits divided by the temperature",
    "logits: slice": "logits cut to the response",
    "logits: unpad": "logits without padding",
    "logits: shift": "logits without the last position",
    "logits: over cap": "logits capped",
    "logits: tanh": "logits capped",
    "logits: times cap": "logits capped",
}
_ENDINGS = ((": to fp32", " cast to fp32"), (": to bf16", " cast to bf16"), (": LoRA scale", ", LoRA scaled"))


def spoken(instant: str) -> str:
    """An instant's name in words: `actor: logits cast to fp32`."""
    found = _NAMED.fullmatch(instant)
    who, name = (found["who"], instant[len(found["who"]) :]) if found else _split(instant)
    if name in _WHOLE:
        return who + _WHOLE[name]
    return f"{who}{_PARTS[found['part']]}{_operation(found['operation'])}" if found else instant


def _split(instant: str) -> tuple[str, str]:
    """The role that runs, and the rest of the name; without a role, "" and the whole name."""
    who, joint, name = instant.rpartition(": ")
    return who + joint, name


def _operation(name: str) -> str:
    if name in _OPERATIONS:
        return _OPERATIONS[name]
    for ending, words in _ENDINGS:
        if name.endswith(ending):
            name = name.removesuffix(ending) + words
    return re.sub(r"^nll\b", "cross entropy", name).replace(": ", ", ")
