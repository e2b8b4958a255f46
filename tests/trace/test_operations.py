"""The kernels that a layer's tape stands for, and the views beside them, are what Transformers and PEFT dispatch."""

from __future__ import annotations

import json
from statistics import median
from typing import Any, NamedTuple

import pytest

from calc.autograd import kernels
from calc.autograd.kernels import Kernels
from calc.autograd.polynomial import in_bytes
from calc.memory.activations import program
from calc.memory.run import Adapter, Run, dimensions
from calc.models.hf_config import from_config
from calc.throughput.work import ADAPTER, BY_OPERATIONS, HOOKED, LAYER
from tests.trace.test_trace import HERE, answers

TOKENS = 128
SIZES = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1024,
         "vocab_size": 512, "pad_token_id": 0}  # fmt: skip
PLAIN = {name: n for name, n in SIZES.items() if name != "num_key_value_heads"}
STATES = {"mamba_n_heads": 16, "mamba_d_head": 32, "mamba_d_state": 64, "mamba_chunk_size": 64, "mamba_n_groups": 1}
# The residual stream's dropout is off, as while a reference scores.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "qwen2": SIZES,
    "qwen3": SIZES | {"head_dim": 32},
    "gemma3_text": SIZES | {"head_dim": 32},
    "olmo": PLAIN,
    "olmo2": SIZES,
    "nemotron": SIZES,
    "granite": SIZES,
    "glm4": SIZES | {"head_dim": 32},
    "cohere2": SIZES,
    "apertus": SIZES,
    "phi": PLAIN,
    "stablelm": PLAIN | {"num_key_value_heads": 8},
    "starcoder2": SIZES | {"residual_dropout": 0.0},
    "gpt_neox": PLAIN,
    "opt": {"hidden_size": 256, "num_attention_heads": 8, "ffn_dim": 1024, "vocab_size": 512, "dropout": 0.0,
            "word_embed_proj_dim": 256},
    "gpt2": {"n_embd": 256, "n_head": 8, "vocab_size": 512, "resid_pdrop": 0.0, "attn_pdrop": 0.0},
    "gpt_bigcode": {"n_embd": 256, "n_head": 8, "vocab_size": 512, "resid_pdrop": 0.0, "attn_pdrop": 0.0},
    "qwen3_moe": SIZES | {"head_dim": 32, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 512},
    "granitemoehybrid": SIZES | STATES | {"num_local_experts": 0, "num_experts_per_tok": 0,
                                          "shared_intermediate_size": 1024, "layer_types": ["mamba"]},
    "falcon_h1": SIZES | STATES | {"head_dim": 32, "mamba_d_ssm": 512},
}  # fmt: skip
BY_STATES = {"granitemoehybrid", "falcon_h1"}


class Pair(NamedTuple):
    """One pass of one layer: what its tape says, and what was dispatched."""

    tape: Kernels
    moved: int
    seen: dict[str, int]


def asked(family: str, **how: Any) -> str:
    """A case for `operations.py`."""
    config = {"model_type": family, **FAMILIES[family]}
    return json.dumps({"config": config, "lora": None, "checkpointing": False, **how}) + "\n"


def written(config: dict[str, Any], seen: list[dict[str, int]], adapter: Adapter | None = None) -> list[Pair]:
    """Forward and backward of a layer of the model with this config, beside what was seen of them."""
    arch = from_config(config)
    tape = program(Run(arch, trained=adapter is None, adapter=adapter), arch.specs[-1]).layer()
    dims = dimensions(arch, adapter.rank if adapter else 0)
    passes = (kernels.forward(tape), kernels.backward(tape))
    return [Pair(p, in_bytes(p.moved, dims, TOKENS, TOKENS), count) for p, count in zip(passes, seen, strict=True)]


@pytest.fixture(scope="module")
def found() -> dict[str, list[Pair]]:
    """Of each family."""
    given = "".join(asked(family) for family in FAMILIES)
    done = answers(HERE / "operations.py", given=given)
    return {family: written(config, counts) for family, (config, *counts) in zip(FAMILIES, done, strict=True)}


def test_tapes_move_the_bytes_that_are_dispatched(found: dict[str, list[Pair]]) -> None:
    for part, (middle, worst) in enumerate(((0.05, 0.32), (0.05, 0.15))):
        errors = {family: pairs[part].moved / pairs[part].seen["bytes"] - 1 for family, pairs in found.items()}
        print(sorted(errors.items(), key=lambda item: item[1]))
        assert median(map(abs, errors.values())) <= middle
        assert max(map(abs, errors.values())) <= worst


def test_tapes_have_the_kernels_that_are_dispatched(found: dict[str, list[Pair]]) -> None:
    for part in (0, 1):
        errors = {family: pairs[part].tape.number / pairs[part].seen["kernels"] - 1 for family, pairs in found.items()}
        print(sorted(errors.items(), key=lambda item: item[1]))
        assert median(map(abs, errors.values())) <= 0.08
        assert max(map(abs, errors.values())) <= 0.25


def test_a_layer_dispatches_the_views_that_are_counted(found: dict[str, list[Pair]]) -> None:
    for part in (0, 1):
        views = {family: pairs[part].seen["all"] - pairs[part].seen["kernels"] for family, pairs in found.items()}
        print(views)
        assert median([n for family, n in views.items() if family not in BY_STATES]) == pytest.approx(
            LAYER[part], rel=0.1
        )
        more = [views[family] - LAYER[part] for family in BY_STATES]
        assert median(more) == pytest.approx(BY_OPERATIONS[part], rel=0.15)


def test_what_checkpointing_adds_for_each_tensor_that_is_kept(found: dict[str, list[Pair]]) -> None:
    """The operations of a forward more, and 1.4 for each tensor; the hooks themselves are no operations."""
    names = ("llama", "gemma3_text", "opt")
    done = answers(HERE / "operations.py", given="".join(asked(name, checkpointing=True) for name in names))
    for name, (_, *recomputed) in zip(names, done, strict=True):
        plain = [pair.seen for pair in found[name]]
        more = sum(part["all"] for part in recomputed) - sum(part["all"] for part in plain)
        assert found[name][0].tape.kept == pytest.approx(plain[0]["kept"], rel=0.25)
        assert more - plain[0]["all"] == pytest.approx((HOOKED - 3) * plain[0]["kept"], abs=10)
    reentrant = answers(HERE / "operations.py", given=asked("llama", checkpointing="reentrant"))[0][1:]
    plain = [pair.seen for pair in found["llama"]]
    more = sum(part["all"] for part in reentrant) - sum(part["all"] for part in plain)
    assert more == pytest.approx(plain[0]["all"], abs=2)


@pytest.mark.parametrize(("dtype", "b"), [("bf16", 2), ("fp32", 4)])
def test_adapters_dispatch_and_move_what_is_counted(found: dict[str, list[Pair]], dtype: str, b: int) -> None:
    """Seven linears of a Llama layer."""
    config, *counts = answers(HERE / "operations.py", given=asked("llama", lora=dtype))[0]
    for part, pair in enumerate(written(config, counts, Adapter(8, "all-linear", False, b))):
        assert pair.moved == pytest.approx(pair.seen["bytes"], rel=0.12)
        assert pair.tape.number == pytest.approx(pair.seen["kernels"], rel=0.12)
        views = pair.seen["all"] - pair.seen["kernels"] - LAYER[part]
        assert views / 7 == pytest.approx(ADAPTER[part], abs=2.5)
