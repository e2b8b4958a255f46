"""SGLang: the way it divides a card. Read in the wheels 0.5.5 to 0.5.15, paths below `sglang/srt`.

Weights and KV cache together get a share of what was free before the weights were loaded, `mem_fraction_static`; other
processes on the card make that less. The cache is what is left of it (`model_executor/model_runner.py`,
`init_torch_distributed`; `model_executor/model_runner_kv_cache_mixin.py`, `profile_max_num_token`, later
`_profile_available_bytes`). Activations and CUDA graphs take what is beyond the share: nothing is tried out, and
nothing is refused for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from calc.base.ledger import Line
from calc.base.plan import Serving
from calc.base.refusal import Refusal
from calc.base.units import GiB
from calc.engines.rollout import ROLE, Cache, Starting, Unstarted
from calc.memory import kv_cache
from calc.models.architecture import Architecture

NAME = "SGLang"
# Bytes for each logit of a decoding step: the head's product, its cast to fp32, and a softmax of that beside it, or its
# logarithm (`layers/logits_processor.py`, `logits.float()`; `layers/sampler.py`)
LOGIT = 10
# Bytes that its process keeps while it sleeps, beside a CUDA context and NCCL's buffers for one group, 1.40 GiB as they
# are counted here: 3.17 GiB in all on an H100 with engines of two GPUs, 3.24 on an H200 (THUDM/slime, issues 1767 and
# 1951)
KEPT = int(1.81 * GiB)
# Tokens of one prefill by a card's memory (`server_args.py`, `_handle_gpu_memory_settings`): bytes below which a card
# takes so many
CHUNKS = ((35 * GiB, 2048), (60 * GiB, 4096), (160 * GiB, 8192))
LARGEST = 16384
# Sequences at once at the least, if the cache has room for them (`max_running_requests`, `_resolve_max_num_reqs`)
REQUESTS = 2048


@dataclass(frozen=True, slots=True)
class Sglang:
    """One rank of an SGLang engine on a card of `total` bytes.

    `static` is its share; `around` the memory that its process has taken of the card before it first looks: CUDA's
    context, and NCCL's buffers.
    """

    arch: Architecture
    serving: Serving
    tensor_parallel: int
    static: float
    total: int
    around: int

    @property
    def max_num_seqs(self) -> int:
        """The most sequences at once: what the framework sends to an engine at most, or SGLang takes."""
        return min(self.serving.max_num_seqs or REQUESTS, REQUESTS)

    @property
    def schedules_ahead(self) -> bool:
        """True: its schedulers run one batch ahead (`disable_overlap_schedule` of `server_args.py` is False)."""
        return True

    @property
    def chunk(self) -> int:
        """Tokens of one prefill (`chunked_prefill_size`)."""
        return next((tokens for below, tokens in CHUNKS if self.total < below), LARGEST)

    def weights(self) -> list[Line]:
        """This rank's share of the model in bf16."""
        return [kv_cache.weights(ROLE, self.arch, self.tensor_parallel)]

    def working(self) -> list[Line]:
        """The memory that a step takes beside the share: a prefill's activations, or the logits of all sequences."""
        rows = min(self.max_num_seqs, self.chunk)
        return [kv_cache.profile(ROLE, self.arch, self.chunk, rows, LOGIT, self.tensor_parallel)]

    def graphs(self) -> list[Line]:
        """CUDA graphs of decoding, which leave with the rest (`SGLANG_MEMORY_SAVER_CUDA_GRAPH`)."""
        return [kv_cache.graphs(ROLE, self.arch)] if self.serving.graphs else []

    def asleep(self) -> list[Line]:
        """The memory that its kernels keep: weights, cache and graphs are given back (`release_memory_occupation`)."""
        return [kv_cache.kept(ROLE, KEPT)]

    def with_weights(self) -> list[Line]:
        """The lines of an engine that is awake for new weights, its cache and graphs still unmapped."""
        return [*self.weights(), *self.asleep()]

    def awake(self, others: int) -> list[Line]:
        """All lines of an engine that serves."""
        return [*self.with_weights(), self.pool(others), *self.working(), *self.graphs()]

    def pool(self, others: int) -> Line:
        """The KV cache, a slot for each token, allocated whole."""
        return kv_cache.slots(ROLE, self.cache(others).tokens, self.arch, self.tensor_parallel)

    def starting(self, moment: Starting, others: int) -> list[Line]:
        """The lines at one of the instants of `STARTING`; there is no profile run, and graphs come last."""
        match moment:
            case "weights on the GPU" | "profile run":
                return self.weights()
            case "KV cache allocated":
                return [*self.with_weights(), self.pool(others), *self.graphs()]
            case other:
                assert_never(other)

    def host(self, level: int) -> list[Line]:
        """Empty: weights are dropped, and sent again before the next rollout."""
        return []

    def cache(self, others: int) -> Cache:
        """The KV cache that the engine allocates if `others` bytes of the card are not its own."""
        refusal = self._starts()
        each = kv_cache.token_bytes(self.arch, self.tensor_parallel)
        tokens = 0 if refusal else max(0, self.room(others)) // each
        if refusal is None and not tokens:
            why = "more; loaded weights leave no memory for SGLang's KV cache"
            said = Refusal("rollout.gpu_memory_utilization", self.static, why)
            refusal = Unstarted(said, f"its share of {self.static} leaves no room for a KV cache", NAME)
        sequences = min(self.max_num_seqs, tokens // self.serving.max_model_len)
        return Cache(tokens * each, tokens, tokens, sequences, refusal)

    def room(self, others: int) -> int:
        """Bytes left for the cache; negative if the model alone is too large."""
        free = self.total - others - self.around
        return int(free * self.static) - sum(line.bytes for line in self.weights())

    def _starts(self) -> Unstarted | None:
        """The reason that the engine refuses its number of ranks, or None."""
        kv, ranks = self.arch.kv_heads, self.tensor_parallel
        if self.arch.attends and kv % ranks and ranks % kv:
            refusal = Refusal("rollout.tensor_parallel", ranks, f"a divisor or multiple of {kv} key/value heads")
            return Unstarted(refusal, f"{ranks} GPUs cannot share {kv} key/value heads", NAME)
        return None
