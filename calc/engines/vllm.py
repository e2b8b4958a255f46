"""vLLM: the way it divides a card, by release. Paths are those of the wheels 0.4.2 to 0.29.0.

A card's pool is a share of its memory, `gpu_memory_utilization`. What is taken off before the rest becomes KV cache,
and whether other processes count, differs:

- to 0.7, and by the first of the two engines of 0.8 to 0.10: weights, the profile run's peak, and what the process grew
  by outside PyTorch; others do not count (worker/worker.py:205-271)
- 0.8 and 0.9.0: everything on the card that this process's PyTorch has not allocated counts too, whoever holds it
  (v1/worker/gpu_worker.py:165-212; :202-214 of 0.9.0)
- from 0.9.1: as to 0.7 (#18974; gpu_worker.py:201-219), but the engine does not start where less is free than its pool
  (:129-144, later v1/worker/utils.py); from 0.11 it looks after NCCL has its buffers, which the pool then need not hold
- from 0.20: CUDA graphs belong to the pool too, as vLLM estimates them before capture (gpu_worker.py:399-426 of 0.20.0,
  whose log says 0.21). It captures two graphs of each mode and multiplies the second (gpu_model_runner.py:6049-6147 of
  0.21.0), although graphs share a pool: reports have it several times too high (#45178, #53013). It is counted here as
  what the graphs then take; `VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0` brings back the older division

verl's worker for vLLM up to 0.6 takes the share of what is free after the profile run instead
(verl/third_party/vllm/vllm_v_0_6_3/worker.py:210).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from calc.base.ledger import Line
from calc.base.plan import Serving
from calc.base.refusal import Refusal
from calc.base.units import GiB, gib
from calc.base.versions import numbers
from calc.engines.rollout import ROLE, Cache, Starting, Unstarted
from calc.memory import kv_cache
from calc.memory.host import ROUNDED, HostAllocator
from calc.models.architecture import Architecture

OWN = (0, 9, 1)  # the first release after 0.8 whose share is the engine's own
# vLLM's second model runner does not say before 0.29 what CUDA graphs will take (v1/worker/gpu/model_runner.py,
# profile_cudagraph_memory), so that they come on top of the pool. The families that it runs, by their first release
# (config/vllm.py, DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES of 0.22 to 0.28), and from 0.25 on every dense one of attention
SECOND_RUNNER = {"qwen3": (0, 22), "llama": (0, 23), "mistral": (0, 23), "deepseek_v2": (0, 24), "qwen2_moe": (0, 24)}
DENSE, NEVER = (0, 25), (10**6,)


@dataclass(frozen=True, slots=True)
class Vllm:
    """One rank of a vLLM engine on a card of `total` bytes, called `card`.

    `context` is the memory that its process takes of the card before vLLM first looks, 0 for an engine that lives in
    the trainer's process; `growth` the memory that it takes later beside weights and activations: NCCL's buffers.
    `v0`: the first of a release's two engines runs. `pins`: the allocator of pinned host memory.
    """

    arch: Architecture
    serving: Serving
    tensor_parallel: int
    utilization: float
    total: int
    card: str = ""
    context: int = 0
    growth: int = 0
    v0: bool = False
    pins: HostAllocator = ROUNDED

    @property
    def first(self) -> bool:
        """True for vLLM's first engine: the only one to 0.7, and `v0` asks for it after."""
        return self.v0 or self.release < (0, 8)

    @property
    def release(self) -> tuple[int, ...]:
        """The numbers of the version."""
        return numbers(self.serving.version)

    @property
    def max_num_seqs(self) -> int:
        """The most sequences at once (engine/arg_utils.py; from 0.8 the defaults of the `LLM` class)."""
        if self.serving.max_num_seqs is not None:
            return self.serving.max_num_seqs
        return min(1024 if self._large else 256, self.serving.max_num_batched_tokens or self._tokens)

    @property
    def max_num_batched_tokens(self) -> int:
        """The most tokens of one step; after 0.11 no more than all sequences at once can have."""
        if self.serving.max_num_batched_tokens is not None:
            return self.serving.max_num_batched_tokens
        return self._tokens if self.release < (0, 12) else min(self._tokens, self.max_num_seqs * self._length)

    @property
    def schedules_ahead(self) -> bool:
        """True from 0.14 on, but under Ray (`async_scheduling`, config/vllm.py:964-1004 of 0.24.0; #27614)."""
        return self.release >= (0, 14) and self.serving.executor != "ray"

    @property
    def _length(self) -> int:
        return self.serving.max_model_len

    @property
    def _large(self) -> bool:
        """True if vLLM takes larger batches on this card: from 70 GiB on, and from 0.9 on unless it is an A100."""
        a100 = self.release >= (0, 9) and "a100" in self.card.casefold()
        return not self.first and self.total >= 70 * GiB and not a100

    @property
    def _tokens(self) -> int:
        """Tokens of one step by default: the first engine does not cut a prompt, so that the longest has to fit."""
        if self.first:
            return max(self._length, 2048)
        return 16384 if self._large else 8192

    def weights(self) -> list[Line]:
        """This rank's share of the model in bf16."""
        return [kv_cache.weights(ROLE, self.arch, self.tensor_parallel)]

    def profile(self) -> list[Line]:
        """The peak of the profile run beyond the weights, which vLLM keeps free for its steps.

        Its sampler sorts all logits up to 0.17; from 0.18 a Triton kernel does without
        (v1/sample/ops/topk_topp_triton.py). The second runner draws without either, as if nothing asked for the largest
        (v1/worker/gpu/model_runner.py:639-641 of 0.24.0).
        """
        tokens, rows = self.max_num_batched_tokens, self.max_num_seqs
        logit = kv_cache.SORTED if self.release < (0, 18) else kv_cache.SEARCHED
        if self._second_runner:
            logit = kv_cache.DRAWN
        return [kv_cache.profile(ROLE, self.arch, tokens, min(rows, tokens), logit, self.tensor_parallel)]

    def asleep(self) -> list[Line]:
        """Memory that sleep cannot free: CUDA graphs, which lie outside the pool that it unmaps."""
        return [kv_cache.graphs(ROLE, self.arch)] if self.serving.graphs else []

    def with_weights(self) -> list[Line]:
        """The lines of an engine that is awake for new weights, its cache still unmapped."""
        return [*self.weights(), *self.asleep()]

    def awake(self, others: int) -> list[Line]:
        """All lines of an engine that serves."""
        cache = kv_cache.cache(ROLE, self.cache(others).blocks, self.arch, self.tensor_parallel)
        return [*self.weights(), cache, *self.profile(), *self.asleep()]

    def starting(self, moment: Starting, others: int) -> list[Line]:
        """The lines at one of the instants of `STARTING`."""
        match moment:
            case "weights on the GPU":
                return self.weights()
            case "profile run":
                return [*self.weights(), *self.profile()]
            case "KV cache allocated":
                # what the profile run took is free again until the first request
                reserved = self.profile()
                return [line for line in self.awake(others) if line not in reserved]
            case other:
                assert_never(other)

    def host(self, level: int) -> list[Line]:
        """Host memory of this rank: V0's swap space, and at sleep `level` 1 the weights; level 0: it never sleeps."""
        swap = [kv_cache.swap(ROLE, self.arch, self.tensor_parallel, self.pins)] if self.first else []
        asleep = [kv_cache.backup(ROLE, self.arch, self.tensor_parallel, self.pins)] if level == 1 else []
        return [*swap, *asleep]

    def cache(self, others: int) -> Cache:
        """The KV cache that the engine allocates if `others` bytes of the card are not its own."""
        crowded = self._crowded(others)
        refusal = self._starts() or crowded
        pool = kv_cache.pool(self.arch, self.tensor_parallel)
        blocks = 0 if refusal else max(0, self.room(others)) // pool.bytes
        each = pool.blocks(self._length)  # of a sequence of the full length
        tokens = blocks * self._length // each if pool.states else blocks * pool.tokens
        if refusal is None and not blocks:
            why = "more; vLLM has no available memory for the cache blocks"
            refusal = self._share(why, f"its share of {self.utilization} leaves no room for a KV cache")
        elif refusal is None and tokens < self._length:
            room = f"larger than the {tokens} tokens that can be stored in KV cache"
            left = f"leaves a KV cache of {tokens} tokens, less than one sequence of {self._length}"
            refusal = self._share(
                f"more; the model's max seq len ({self._length}) is {room}", f"its share of {self.utilization} {left}"
            )
        sequences = min(self.max_num_seqs, blocks // each)
        return Cache(blocks * pool.bytes, tokens, blocks, sequences, refusal, crowded is not None)

    def room(self, others: int) -> int:
        """Bytes left for the cache; negative if the model alone is too large."""
        used = sum(line.bytes for line in (*self.weights(), *self.profile()))
        around = others + self.context + self.growth
        if self.serving.share_of_free:
            return int(self.utilization * (self.total - around - used))
        if (0, 8) <= self.release < OWN and not self.first:
            used += around
        elif self.release < (0, 11):
            used += self.growth
        elif self.release >= ((0, 29) if self._second_runner else (0, 20)):
            used += sum(line.bytes for line in self.asleep())
        return self._pool - used

    @property
    def _second_runner(self) -> bool:
        """True if the model's steps are the second runner's."""
        plain = not self.arch.experts and not self.arch.recurrent
        return self.release >= SECOND_RUNNER.get(self.arch.family, DENSE if plain else NEVER)

    def _share(self, allowed: str, words: str) -> Unstarted:
        """The refusal of the engine's share of the card."""
        return Unstarted(Refusal("rollout.gpu_memory_utilization", self.utilization, allowed), words)

    @property
    def _pool(self) -> int:
        """Bytes of the card that are this engine's share."""
        return int(self.utilization * self.total)

    def _starts(self) -> Unstarted | None:
        """The reason that the engine refuses its number of ranks, or None."""
        kv, ranks = self.arch.kv_heads, self.tensor_parallel
        if self.arch.attends and kv % ranks and ranks % kv:
            refusal = Refusal("rollout.tensor_parallel", ranks, f"a divisor or multiple of {kv} key/value heads")
            return Unstarted(refusal, f"{ranks} GPUs cannot share {kv} key/value heads")
        return None

    def _crowded(self, others: int) -> Unstarted | None:
        """The reason that the engine refuses the room that others leave it, before it loads anything, or None."""
        free = self.total - others - self.context - (self.growth if self.release >= (0, 11) else 0)
        if self.release >= OWN and not self.first and free < self._pool:
            asked, found = gib(self._pool, 2), gib(free, 2)
            why = f"less; vLLM finds {found} free on startup, less than the {asked} it is to use"
            return self._share(why, f"it asks for {asked} and finds {found} free")
        return None
