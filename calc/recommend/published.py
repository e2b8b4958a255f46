"""Minimal configurations that others publish, beside ours: on how many GPUs the same job runs, and what differs.

verl's table is `docs/perf/device_tuning.rst` at 2239fd0 with the scripts in `examples/tuning/` that it names, read for
verl 0.4. Its rows are the smallest machines on which somebody ran the job, not the smallest on which it could run. Of
the two kinds of 72B jobs, the full fine-tuning ones are assumed to have verl's default batch, the LoRA one the lengths
of the 7B LoRA job; the offloading of the 72B LoRA job is not known, and it splits sequences over two GPUs, which is not
modelled here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from calc.catalog.catalog import Catalog
from calc.recommend.machines import smallest
from calc.recommend.problem import Configuration
from calc.scenario.rules import flatten

SOURCE = (
    "https://github.com/verl-project/verl/blob/2239fd0ff7210c80ad63e20581924d1f66167429/docs/perf/device_tuning.rst"
)


class Published(NamedTuple):
    """A published minimum: the `job` as fields of a scenario, its `gpus`, and the `settings` it was run with."""

    title: str
    job: Mapping[str, Any]
    gpus: int
    settings: Mapping[str, Any]
    source: str


class Difference(NamedTuple):
    """A setting in which the published run and ours differ."""

    field: str
    theirs: Any
    ours: Any


class Comparison(NamedTuple):
    """A published minimum beside ours; `ours` is None if we find no number of GPUs that suffices."""

    published: Published
    ours: Configuration | None

    @property
    def gpus(self) -> int | None:
        """The number of GPUs that ours needs."""
        return self.ours.scenario.gpus if self.ours else None

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The settings that ours sets otherwise."""
        if self.ours is None:
            return ()
        ours = {"gpus": self.published.gpus, **flatten(self.ours.scenario.as_dict())}
        theirs = {"gpus": self.published.gpus, **self.published.settings}
        return tuple([Difference(name, value, ours[name]) for name, value in theirs.items() if ours[name] != value])


def _grpo(model: str, gpu: str, prompt: int, response: int, batch: int, **more: Any) -> dict[str, Any]:
    """A GRPO job of the table: five responses to a prompt, and a reference model (`use_kl_loss` in every script)."""
    return {
        "model": model, "task": "grpo", "gpu": gpu, "framework": "verl==0.4", "roles.reference": {},
        "prompt_len": prompt, "response_len": response, "rollout.n": 5, "rollout.batch": batch, "method": "full",
        **more,
    }  # fmt: skip


def _settings(share: float, tensor_parallel: int, **more: Any) -> dict[str, Any]:
    """The settings of the scripts: FSDP 1, checkpointing, both offloads, vLLM's share of the card and its ranks."""
    return {
        "sharding": "fsdp1", "checkpointing": "full", "offload.optimizer": True, "offload.parameters": True,
        "rollout.gpu_memory_utilization": share, "rollout.tensor_parallel": tensor_parallel, **more,
    }  # fmt: skip


LORA = {"method": "lora", "lora.rank": 32}
VERL = (
    Published("Qwen2-7B, GRPO", _grpo("qwen2-7b", "h800", 1024, 1024, 1024), 2,
              _settings(0.6, 2, micro_batch=16), SOURCE),
    Published("Qwen2-72B, GRPO", _grpo("qwen2-72b", "h800", 512, 512, 1024), 32, _settings(0.6, 16), SOURCE),
    Published("Qwen2-72B, GRPO", _grpo("qwen2-72b", "h20", 512, 512, 1024), 32, _settings(0.6, 16), SOURCE),
    Published("Qwen2.5-7B, GRPO with LoRA", _grpo("qwen2.5-7b", "h100-sxm", 512, 1024, 16, **LORA), 1,
              _settings(0.2, 1), SOURCE),
    Published("Qwen2.5-72B, GRPO with LoRA", _grpo("qwen2.5-72b", "h100-sxm", 512, 1024, 176, **LORA), 8,
              {"rollout.gpu_memory_utilization": 0.4, "rollout.tensor_parallel": 8}, SOURCE),
)  # fmt: skip


def compare(row: Published, catalog: Catalog | None = None) -> Comparison:
    """A published minimum beside the smallest number of the same GPUs on which we find the job to fit."""
    found = smallest(row.job, catalog)
    return Comparison(row, found.least.configuration if found.least else found.recommendation.recommended)
