"""Peaks that Megatron-LM's own functional tests store, beside estimates of the same jobs from their arguments.

A test file of that project has the arguments of a run, the most bytes that PyTorch's allocator had in use on the last
rank (`mem-max-allocated-bytes`), and the time of its steps; `measurements/megatron/golden.jsonl` holds them, for
decoders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path as File
from typing import Any, NamedTuple

from calc.base.ledger import total
from calc.base.optimizers import USUAL
from calc.base.plan import Path
from calc.engines.megatron import Megatron
from calc.engines.megatron_fsdp import MegatronFsdp
from calc.engines.replica import Replica
from calc.memory.optimizer import Optimizer
from calc.memory.run import Run
from calc.memory.runtime import WORKSPACE_HOPPER, WORKSPACES
from calc.models.architecture import BEFORE, Architecture, LayerSpec, Norms, parameters, tensors
from calc.models.mixers import Mla, Ssm
from calc.models.slices import part
from calc.scenario.words import Checkpointing
from calc.step import schedule_megatron
from calc.step.instants import Batch, Step, step
from calc.throughput.work import layers

FILE = File(__file__).parents[2] / "measurements" / "megatron" / "golden.jsonl"
# the vocabulary of GPT-2's tokenizer, whose files the tests name, padded so that each rank has a multiple of these rows
VOCABULARY, ROWS = 50_257, 128
LATENT = {"q-lora-rank": 512, "kv-lora-rank": 512, "qk-head-dim": 128, "qk-pos-emb-head-dim": 64, "v-head-dim": 128}


@dataclass(frozen=True, slots=True)
class Golden:
    """One run: its name, where its figure is from, and its peak in bytes as stored and as estimated.

    `experts`: the model has routed experts, whose tokens are taken to be spread evenly.
    """

    id: str
    experts: bool
    source: str
    measured: int
    predicted: int

    @property
    def error(self) -> float:
        """The relative error, positive where the estimate is too high."""
        return self.predicted / self.measured - 1


def architecture(a: Mapping[str, Any]) -> Architecture:
    """The model of a run's arguments; defaults are those of `megatron/training/arguments.py`."""
    hidden, heads = a["hidden-size"], a["num-attention-heads"]
    gated = a.get("swiglu", False)
    usual = int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden
    rotated = a.get("position-embedding-type") == "rope"
    rms, bias = a.get("normalization") == "RMSNorm", not a.get("disable-bias-linear", False)
    rows = a.get("make-vocab-size-divisible-by", ROWS) * a.get("tensor-model-parallel-size", 1)
    experts = a.get("num-experts", 0)
    low, shared = latent(a), a.get("moe-shared-expert-intermediate-size", 0)
    spec = LayerSpec("latent" if low else "attention", "dense", rotated=rotated)
    routed = routes(a) if experts else (False,) * a.get("num-layers", 0)
    dropped = a.get("hidden-dropout", 0.1) > 0
    specs = tuple(spec._replace(mlp="experts") if each else spec for each in routed)
    mixed = "hybrid-layer-pattern" in a
    if mixed:
        specs = tuple(spec for segment in segments(a) for spec in segment)
    return Architecture(
        family="gpt",
        hidden=hidden,
        specs=specs,
        depths=specs[-1:] * a.get("mtp-num-layers", 0),
        heads=heads,
        kv_heads=a.get("num-query-groups", heads),
        head_dim=low.qk_nope_head_dim + low.qk_rope_head_dim if low else a.get("kv-channels", hidden // heads),
        intermediate=a.get("ffn-hidden-size", usual),
        vocab=-(-a.get("vocab-size", VOCABULARY) // rows) * rows,
        tied=not a.get("untie-embeddings-and-output-weights", False),
        max_positions=a["max-position-embeddings"],
        positions=0 if rotated else a["max-position-embeddings"],
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        qk_norm="heads" if a.get("qk-layernorm") else "",
        norm="rms" if rms else "layer",
        norm_bias=not rms,
        gated=gated,
        experts=experts,
        experts_per_token=a.get("moe-router-topk", 2) if experts else 0,
        moe_intermediate=a.get("moe-ffn-hidden-size", a.get("ffn-hidden-size", usual)) if experts else 0,
        shared_experts=int(shared > 0),
        shared_intermediate=shared,
        mla=low,
        ssm=state_space(a) if mixed else None,
        norms=Norms("norm", mlp="") if mixed else BEFORE,
        activation="silu" if gated else "gelu",
        residual_dropout=dropped,
        embedding_dropout=dropped,
        attention_dropout=a.get("attention-dropout", 0.1) > 0,
        modeling="megatron-local" if a["transformer-impl"] == "local" else "megatron",
    )


def routes(a: Mapping[str, Any]) -> tuple[bool, ...]:
    """One flag a layer, true if it has routed experts: all layers, every so many, or `([0]*1+[1]*15)`
    (`moe_freq_type`).
    """
    frequency, layers = a.get("moe-layer-freq", 1), a["num-layers"]
    if isinstance(frequency, int):
        return tuple(index % frequency == 0 for index in range(layers))
    runs = re.findall(r"\[([01])\] ?\* ?(\d+)", frequency)
    return tuple(kind == "1" for kind, count in runs for _ in range(int(count)))


def segments(a: Mapping[str, Any]) -> list[tuple[LayerSpec, ...]]:
    """The layers of each piece of a hybrid model, as a pattern such as `M-M*|M-` names them."""
    kinds = {"M": LayerSpec("ssm", "none"), "*": LayerSpec("attention", "none"), "-": LayerSpec("none", "dense")}
    rotated = a.get("position-embedding-type") == "rope"
    found = a["hybrid-layer-pattern"].split("|")
    return [tuple(kinds[kind]._replace(rotated=rotated) for kind in segment) for segment in found]


def state_space(a: Mapping[str, Any]) -> Ssm:
    """The state space of a hybrid model's layers (`TransformerConfig`, `MambaMixer`)."""
    wide = a.get("mamba-head-dim", 64)
    heads = a.get("mamba-num-heads", 2 * a["hidden-size"] // wide)
    return Ssm(
        heads, wide, a.get("mamba-num-groups", 8), a.get("mamba-state-dim", 128), kernel=4, chunk=128, state_bytes=4
    )


def latent(a: Mapping[str, Any]) -> Mla | None:
    """The low ranks of a run's multi-head latent attention, if it has that (`MLATransformerConfig`)."""
    if not a.get("multi-latent-attention"):
        return None
    sizes = (a.get(name, usual) for name, usual in LATENT.items())
    return Mla(*sizes)


class Cut(NamedTuple):
    """The division of a run's model and batch.

    `stages`: pipeline stages. `pieces`: the layers in each piece of the last stage. `ranks`: GPUs with the same layers
    and other sequences. `micro`: micro batches of a step, each of so many `tokens`.
    """

    stages: int
    pieces: tuple[int, ...]
    ranks: int
    micro: int
    tokens: int

    @property
    def chunks(self) -> int:
        """The pieces of a stage."""
        return len(self.pieces)


def cut(record: Mapping[str, Any]) -> Cut:
    """The cut that a run's arguments and its number of GPUs make."""
    a = record["arguments"]
    tensor, stages = a.get("tensor-model-parallel-size", 1), a.get("pipeline-model-parallel-size", 1)
    context = a.get("context-parallel-size", 1)
    ranks = record["gpus"] // (tensor * stages)
    # or a schedule of batches, `0:384 200B:768`, of which the first counts
    batch = a.get("global-batch-size") or int(re.split("[: ]", a["step-batch-size-schedule"])[1])
    micro = batch * context // (a["micro-batch-size"] * ranks)
    tokens = a["micro-batch-size"] * a["seq-length"]
    return Cut(stages, pieces(a, stages), ranks, micro, tokens)


def pieces(a: Mapping[str, Any], stages: int) -> tuple[int, ...]:
    """The layers of each piece of the last of `stages`, from the first to the last.

    A layout names all pieces of all stages in turn, `Et*2|(tt|)*5t|tmL`: embedding, layers, depths, loss
    (`pipeline_parallel_layer_layout.py`).
    """
    if "hybrid-layer-pattern" in a:
        return tuple(len(segment) for segment in segments(a)[stages - 1 :: stages])
    if layout := a.get("pipeline-model-parallel-layout"):
        whole = re.sub(r"\(([^)]*)\)\*(\d+)|(\w)\*(\d+)", lambda m: (m[1] or m[3]) * int(m[2] or m[4]), layout)
        return tuple(piece.count("t") for piece in whole.split("|")[stages - 1 :: stages])
    loss = int(a.get("account-for-loss-in-pipeline-split", False))
    layers = (a["num-layers"] + loss + a.get("account-for-embedding-in-pipeline-split", False)) // stages
    layers = a.get("decoder-last-pipeline-num-layers", layers)
    chunks = layers // a.get("num-layers-per-virtual-pipeline-stage", layers)
    chunks = a.get("num-virtual-stages-per-pipeline-rank", chunks)
    # the loss takes a layer's place (`get_num_layers_to_build`)
    return (*[layers // chunks] * (chunks - 1), layers // chunks - loss)


def running(a: Mapping[str, Any], arch: Architecture) -> Run:
    """`arch` as one rank computes it under the run's arguments."""
    local, tensor = a["transformer-impl"] == "local", a.get("tensor-model-parallel-size", 1)
    unfused = local or a.get("attention-backend") == "unfused"
    split = a.get("expert-tensor-parallel-size", tensor) if arch.experts else 1
    return Run(
        part(arch, tensor, a.get("expert-model-parallel-size", 1), split),
        training=True,
        kernel="eager" if unfused else "flash",
        sequences=a.get("sequence-parallel", False) and tensor > 1,
        deterministic=a.get("deterministic-mode", False),
        linear_kernels=True,
        reentrant=a.get("recompute-granularity") == "full",
        again=frozenset(re.findall(r"\w+", a.get("recompute-modules", ""))),
    )


def held(a: Mapping[str, Any], whole: Architecture, c: Cut) -> tuple[LayerSpec, ...]:
    """The layers of the last stage, of which others lie between the pieces."""
    if "hybrid-layer-pattern" in a:
        return tuple(spec for segment in segments(a)[c.stages - 1 :: c.stages] for spec in segment)
    return whole.specs[-sum(c.pieces) :]


def dispatched(record: Mapping[str, Any]) -> float:
    """Operations that a rank's host dispatches for the layers in one step, those of the pipeline's bubble included."""
    a, c = record["arguments"], cut(record)
    forward, again, backward = layers(running(a, architecture(a)), False, c.tokens, a["seq-length"]).dispatched
    once = forward + backward + (again if a.get("recompute-granularity") == "full" else 0)
    return once / c.stages * (c.micro + (c.stages - 1) / c.chunks)


def golden(record: Mapping[str, Any]) -> Golden:
    """A record with its estimate: the largest instant of the last rank's step."""
    a, c = record["arguments"], cut(record)
    whole, stages = architecture(a), c.stages
    context = a.get("context-parallel-size", 1)
    last = whole
    if stages > 1:
        # the last stage has a copy of a tied embedding, as its head
        last = replace(whole, specs=held(a, whole, c), embeds=False, tied=False)
    run = running(a, last)
    last = run.arch
    run = replace(run, arch=replace(last, specs=last.specs[last.layers - c.pieces[-1] :]))
    compiled = a.get("cross-entropy-loss-fusion", False)
    model = Replica(
        role="actor",
        arch=last,
        head="lm",
        run=run,
        path=Path("vocab-parallel-compiled" if compiled else "vocab-parallel"),
        parameters=parameters(last),
        weight_bytes=2,
        quantised=False,
        adapter=0,
        adapter_bytes=2,
        trainable=parameters(last),
        trained_tensors=tensors(last),
        grad_bytes=4 if a.get("bf16") and a.get("megatron-fsdp-main-grads-dtype", "fp32") == "fp32" else 2,
        master_bytes=4,
        step_bytes=4,
        optimizer=Optimizer(a.get("optimizer", USUAL), "fused"),
        ranks=c.ranks // a.get("num-distributed-optimizer-instances", 1),
        micro_batches=c.micro,
    )
    how: dict[str, Any] = {
        "distributed": a.get("use-distributed-optimizer", False),
        "fuses": not a.get("no-gradient-accumulation-fusion", False),
        "groups": a.get("moe-grouped-gemm", False),
    }
    engine = Megatron(model, **how)
    if a.get("use-megatron-fsdp", False):
        engine = MegatronFsdp(model, **how, strategy=a["data-parallel-sharding-strategy"])
    batch = Batch(c.tokens // context, a["seq-length"])
    recompute: Checkpointing = "full" if a.get("recompute-granularity") == "full" else "none"

    def piece(run: Run) -> Step:
        return step("actor", run, model.path, model.trainable, batch, masked=False, checkpointing=recompute)

    first = replace(last, specs=last.specs[: c.pieces[0]], ends=False, depths=())
    earlier = piece(replace(run, arch=first)) if c.chunks > 1 else None
    moments = schedule_megatron.training(engine, piece(run), stages - 1, stages, c.chunks, c.micro, earlier=earlier)
    peak = max(total(lines) for _, _, lines in moments)
    fixed = total(engine.resident()) + WORKSPACES * WORKSPACE_HOPPER
    return Golden(record["id"], whole.experts > 0, record["source"], record["max_allocated_bytes"], fixed + peak)


@lru_cache
def all_golden() -> tuple[Golden, ...]:
    """Every record, in the order of its file."""
    return tuple(map(golden, records()))


def records() -> Iterator[Mapping[str, Any]]:
    """The lines of the file."""
    return map(json.loads, FILE.read_text("utf-8").splitlines())
