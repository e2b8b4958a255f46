"""Generation: prompts bound by arithmetic, tokens by memory bandwidth, as many sequences at once as the KV cache holds.

Also the work around it: new weights for the engine, and swaps of weights and states to host memory and back.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from calc.base.plan import Keeps, Role, Stage
from calc.memory import kv_cache
from calc.memory.run import Adapter, Run
from calc.models.architecture import Architecture, language, parameters, tensors
from calc.scenario.scenario import Scenario
from calc.step.placement import FORMATS
from calc.throughput import traffic, work
from calc.throughput.rates import Rates
from calc.throughput.terms import Constant, Term

ENGINE_STEP = Constant(
    2e-3, "seconds of an engine's step that the GPU waits for its scheduler and sampler, where one follows the other",
    "assumed", "no source",
)  # fmt: skip
SEQUENCE = Constant(
    103e-6, "seconds more of such a step for each sequence in it: it is scheduled, and its token sampled and read",
    "calibrated",
    "rollouts of Llama 3.1 8B on eight H100, which NeMo RL's release notes time: timing.sequence",
)  # fmt: skip
AHEAD_STEP = Constant(
    0.239e-3, "seconds that a step's sampler takes where the engine prepares a step while the GPU runs the last",
    "measured", "vLLM 0.24's step of Llama 3 8B with one sequence, on an H200: timing.ahead_step",
)  # fmt: skip
AHEAD_SEQUENCE = Constant(
    9.29e-6, "seconds more of such a step for each sequence in it", "measured",
    "vLLM 0.24's steps of Llama 3 8B with 32 to 512 sequences, on an H200: timing.ahead_sequence",
)  # fmt: skip
EAGER = Constant(
    1.99e-3, "seconds that the host takes for a layer of a decoding step without CUDA graphs", "calibrated",
    "rollouts with adapters of four models on eight H100, which verl's published logs time: timing.eager_layer",
)  # fmt: skip
HANDED = Constant(
    33.5 / 45_337, "seconds that a tensor takes on its way into the engine, however few bytes it has", "published",
    "https://nvidia-nemo.github.io/blog/2025/08/12/nemo-rl-refit-performance: 33.5 s of a DeepSeek V3's 47.2, beside "
    "gathers and copies",
)  # fmt: skip
ASLEEP = Constant(
    1.45 + 0.29, "seconds that vLLM takes to fall asleep and to wake, once an iteration", "published",
    "https://github.com/huggingface/trl/issues/4086: 1.30 to 1.60 and 0.29, as vLLM logs them",
)  # fmt: skip
SWAP = ": swap"  # ends the names of terms that copy what leaves the GPUs between phases
# Kernels of a layer in an engine: two norms, which add the residual, four products, the rotary embedding, a write to
# the cache, attention, and the MLP's activation (vLLM 0.24 model_executor/models/llama.py)
DECODED = 10
REDUCE = Constant(
    9.2e-6, "seconds of a small all-reduce within a node, as a decoding step has two a layer", "published",
    "https://github.com/sgl-project/sglang/pull/2904: vLLM's own of 32 KB takes 8.7 to 11.8 on two to eight H100",
)  # fmt: skip
FAR_REDUCE = Constant(
    19.1e-6, "the same between nodes, by NCCL", "published",
    "https://github.com/NVIDIA/nccl-tests/issues/150: 19.1 for small messages between two A100 over InfiniBand",
)  # fmt: skip


class Engine(NamedTuple):
    """What the time of generation takes from a rollout engine: the tokens that its KV cache holds, the most sequences
    `at_once`, whether it captured CUDA `graphs`, and whether it prepares a step `ahead`, while the GPU runs the last.
    """

    cache_tokens: int
    at_once: int
    graphs: bool = True
    ahead: bool = False


def prefill(arch: Architecture, sequences: float, length: float, shards: int, r: Rates) -> list[Term]:
    """A forward over the prompts of one engine. The head, which only the last position needs, is left out."""
    body, tokens = work.counts(arch, "lm")._replace(head=0), sequences * length
    whole = max(1, round(length))
    layers = work.layers(Run(arch, trained=False, linear_kernels=True), False, round(tokens), whole)
    terms = [
        work.matrix(tokens, body, work.NO_ADAPTERS, work.Passes(), shards, r.matrix),
        work.experts(tokens, 1, body, work.Passes(), shards, shards, r.grouped, r.memory),
        work.attention(tokens, length, body, work.Passes(), True, shards, r.flash),
        work.elementwise(1, layers, work.Passes(), r.eager * shards),
    ]
    if body.scanned:
        terms.append(work.scan(tokens, body.scanned, work.Passes(), shards, r.matrix))
    return terms


def decode(
    sequences: float,
    response: float,
    longest: float,
    context: float,
    at_once: float,
    weights: float,
    b: float,
    rate: float,
    host: float,
    each: float = 0.0,
    operations: float = 0.0,
    matrix: float = 1.0,
) -> Term:
    """Token by token: each step reads the weights once and the KV cache of every sequence that it advances.

    The `sequences` S of one engine, c at a time, take S·R/c steps, which multiply for longer than they read where a
    token's `operations` f are many for the `matrix` rate F; at the end the longest response goes on alone, X - R steps
    more. K is the context of a sequence halfway through its response. In each step the GPU waits `host` seconds (t) for
    work, and `each` (q) for each sequence in it.
    """
    values = {"S": sequences, "R": response, "X": longest, "c": at_once, "W": weights, "K": context, "b": b, "B": rate,
              "t": host, "q": each, "f": operations, "F": matrix}  # fmt: skip
    full, alone, reading = sequences * response / at_once, longest - response, weights / rate
    seconds = full * max(reading, at_once * operations / matrix) + alone * reading + (full + alone) * host
    seconds += sequences * response * (context * b / rate + each)
    formula = "S·R/c·max(W/B, c·f/F) + (X - R)·W/B + (S·R/c + X - R)·t + S·R·(K·b/B + q)"
    return Term("decode", seconds, formula, values, "throughput#rollout")


def read(arch: Architecture, at_once: float, tensor_parallel: int) -> float:
    """Bytes of weights that a decoding step reads on one rank: embeddings are looked up, not read, but a tied head is;
    routed experts count only if a token is sent to them.
    """
    whole = _multiplying(arch, tensor_parallel)
    if not arch.experts:
        return 2.0 * whole
    idle: float = (1 - arch.experts_per_token / arch.experts) ** at_once
    experts = 3 * arch.expert_width * arch.moe_intermediate * arch.experts * arch.sparse_layers
    return 2.0 * (whole - experts * idle / tensor_parallel)


@lru_cache(maxsize=1024)
def _multiplying(arch: Architecture, tensor_parallel: int) -> float:
    """Elements of a rank's weights that tokens are multiplied with, all experts among them."""
    arch = language(arch)
    tables = {t.name for t in tensors(arch) if t.kind == "embedding"}
    shares = [share for share in kv_cache.shares(arch, tensor_parallel) if share.name not in tables]
    head: float = arch.tied * arch.vocab * arch.outer / tensor_parallel
    return head + sum([share.elements * share.layers for share in shares])


def multiplied(arch: Architecture) -> float:
    """Operations of matrix products for one token."""
    c = work.counts(arch, "lm")
    return 2.0 * (c.layers + c.head)


def waits(arch: Architecture, tensor_parallel: int, r: Rates, engine: Engine, reading: float = 0.0) -> float:
    """Seconds of a decoding step in which no bytes of weights or cache move: the engine's own, starts of kernels, and
    what each layer's two small all-reduces take, however few bytes they have.

    Without CUDA graphs the host launches each layer, and the GPU waits beyond the `reading` of the weights.
    """
    reduce = 0.0
    if tensor_parallel > 1:
        reduce = 2 * (REDUCE if tensor_parallel <= r.per_node else FAR_REDUCE)
    known = arch.layers * (DECODED * work.START + reduce)
    step = AHEAD_STEP if engine.ahead else ENGINE_STEP
    return step + (known if engine.graphs else max(known, arch.layers * EAGER - reading))


def served(s: Scenario, r: Rates, engine: Engine) -> list[Term]:
    """Generation by engines of `rollout.tensor_parallel` GPUs each, which share the prompts."""
    assert s.rollout
    arch, tp = (s.role("actor") or s).architecture, s.rollout.tensor_parallel
    sequences = s.rollout.batch * s.rollout.n * tp / s.rollout.gpus
    prompt, response = s.prompt_and_response
    context = prompt + response / 2
    at_once = max(1.0, min(float(engine.at_once), engine.cache_tokens / (prompt + response), sequences))
    terms = prefill(arch, sequences, prompt, tp, r)
    terms = [t._replace(name=f"prefill, {t.name}") for t in terms]
    weights = read(arch, at_once, tp)
    terms.append(
        decode(
            sequences,
            response,
            longest(s),
            context,
            at_once,
            weights,
            kv_cache.read_bytes(arch, context, tp),
            r.memory,
            waits(arch, tp, r, engine, weights / r.memory),
            AHEAD_SEQUENCE if engine.ahead else SEQUENCE,
            multiplied(arch) / tp,
            r.matrix,
        )
    )
    if tp > 1:
        width = sequences * (prompt + response) * arch.hidden * arch.layers
        terms.append(traffic.collective("tensor parallel", width, 2, 4, tp, r.link(tp)))
    return terms


def generated(s: Scenario, r: Rates, stage: Stage, responses: int) -> list[Term]:
    """Generation by Transformers, `stage.rows` sequences at a time, eagerly and launched kernel by kernel.

    Under ZeRO-3 and FSDP each token gathers all weights once more, and fetches this rank's shard first if it is on the
    host.
    """
    own = s.role(stage.role) or s
    arch, ranks = own.architecture, own.data_parallel
    sequences = max(1.0, responses / ranks)
    rows = max(1, min(stage.rows or own.rows, int(sequences)))
    prompt, response = s.prompt_and_response
    c = work.counts(arch, "lm")
    terms = [t._replace(name=f"prefill, {t.name}") for t in prefill(arch, sequences, prompt, 1, r)]
    adapter = Adapter(own.lora.rank, own.lora.modules, False, 2) if own.lora else None
    run = Run(arch, trained=False, adapter=adapter, quantised=own.method == "qlora", nested=own.double_quantization)
    layers = work.layers(run, False, rows, 1)
    host = work.operations(layers.dispatched, work.Passes()) * work.LAUNCH
    weights = 2.0 * (c.layers + c.head)
    terms.append(
        decode(
            sequences,
            response,
            longest(s),
            prompt + response / 2,
            rows,
            weights,
            kv_cache.read_bytes(arch, prompt + response / 2),
            r.memory,
            host,
            operations=multiplied(arch),
            matrix=r.matrix,
        )
    )
    times = sequences * response / rows
    if own.sharded.gathers and ranks > 1:
        terms.append(traffic.collective("gather", parameters(arch), 2, times, ranks, r.link(own.gpus)))
    if own.offload.parameters:
        terms.append(traffic.copied(parameters(arch), 2 * times, ranks, r.pcie))
    return terms


def longest(s: Scenario) -> float:
    """Tokens of the longest response of an iteration: the cap, which one of hundreds is assumed to reach."""
    return float(s.response_len)


def synced(s: Scenario, r: Rates, role: str) -> Iterator[Term]:
    """The weights of a trained role go to the engine: every engine receives all of them once, tensor by tensor."""
    own = s.role(role) or s
    count, number = parameters(own.architecture), handed(own.architecture)
    ranks = s.gpus if s.placement == "separate" else own.gpus
    if ranks > 1:
        stored = FORMATS[own.layout][0] if own.sharded.gathers else 2  # shards are gathered as they are, then cast
        yield traffic.collective("weight sync", count, stored, 1, ranks, r.link(ranks))
    else:
        yield traffic.stepped(count, 4, 1, r.memory)._replace(name="weight sync", source="throughput#rollout")
    values = {"T": number, "h": HANDED}
    yield Term("weight sync: tensors", number * HANDED, "T·h", values, "throughput#rollout")


def handed(arch: Architecture) -> int:
    """Tensors of a model as an engine loads them: three of each expert, whose stacks are taken apart."""
    whole = sum([t.count for t in tensors(arch) if t.kind != "expert"])
    return whole + 3 * arch.experts * arch.sparse_layers


def crossings(keeps: Keeps, role: Role) -> dict[str, int]:
    """Copies of a role's weights to the host or back in an iteration, by what they are for.

    They come for each phase that needs them and leave after it (verl's engine_workers.py:281-425 of 0.9.1, and
    fsdp_workers.py:569-677 of 0.4.0), for that of a role without weights of its own, too; what is paused goes and comes
    once. An engine may read the copies on the host, to which nothing returns.
    """
    name = role.model or role.name
    if role.paused:
        return {name: 2}
    found: dict[str, int] = {}
    for stage in keeps.stages:
        borrows = stage.does == "score" and name == "actor" and keeps.role(stage.role).shares
        if role.name not in (stage.role, stage.beside, stage.joint) and not borrows:
            continue
        match stage.does:
            case "score":
                found[f"{stage.role.partition(',')[0]}, scoring"] = 2
            case "train":
                found[name] = 2
            case "sync":
                found.setdefault("weight sync", 1 if stage.back == "none" else 2)
            case _:
                pass
    return found


def _away(own: Scenario, role: Role, count: int, r: Rates) -> Iterator[Term]:
    """Copies to the host and back of what a role has there while the engine generates, of `count` parameters."""
    weight, _, _, stepped = FORMATS[own.layout]
    moved = weight / (own.shards if own.sharded.gathers else 1) * ("weights" in role.away)
    # both moments; of adapters alone they are few
    moments = 0.0 if own.lora else 2 * stepped / (own.shards if own.sharded.family == "zero" else 1)
    if shares := 2 * (moved + moments * ("optimizer_states" in role.away)):
        yield traffic.copied(count, shares, 1, r.pcie)._replace(name=f"{role.name}{SWAP}")


def swapped(s: Scenario, keeps: Keeps, r: Rates) -> Iterator[Term]:
    """Copies to host memory and back while others work: roles' weights and optimizer states, the engine's weights."""
    assert s.rollout
    for role in keeps.roles:
        if role.pipeline[0] > 0:  # stages of a pipeline swap at once
            continue
        name = role.model or role.name
        own = s.role(name) or s
        count = parameters(own.architecture) // (own.tensor_parallel * own.pipeline_parallel)
        weight, _, master, _ = FORMATS[own.layout]
        # Megatron-core's ranks share states alone, each with weights of its own
        weights = weight * (own.shards if own.sharding == "megatron" else 1) * ("weights" in role.leaves)
        # states that Adam steps on the host stay there; with adapters there are states of them alone
        states = (1 - own.offload.fraction) * (master + 2 * 4) * ("states" in role.leaves)
        if own.lora:
            a = work.adapters(own.architecture, own.lora.rank, own.lora.modules)
            states *= a.elements * own.lora.count / parameters(own.architecture)
        if own.sharded.family != "megatron" and not role.shares:
            yield from _away(own, role, count, r)
        for label, copies in crossings(keeps, role).items():
            if shares := copies * weights + 2 * states * (label == name):
                yield traffic.copied(count, shares, own.shards, r.pcie)._replace(name=f"{label}{SWAP}")
    if keeps.serving and s.rollout.sleep:
        yield Term("rollout: sleep", ASLEEP, "a", {"a": ASLEEP}, "throughput#rollout")
    if keeps.serving and s.rollout.sleep and keeps.serving.sleep_level == 1:
        arch = (s.role("actor") or s).architecture
        yield traffic.copied(parameters(arch), 2, s.rollout.tensor_parallel, r.pcie)._replace(name="rollout: wake")
