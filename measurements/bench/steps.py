"""Training steps as plain PyTorch and Transformers run them: the framework `torch` of `calc`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from measurements.training import logprobs, pair_loss, policy_loss, value_loss

from . import model as models
from . import zero
from .meter import Meter

WARM_UP = 2  # the first step makes the optimizer's states, the second may still load kernels
ENOUGH_SECONDS = 20.0  # timed steps end after this; at least one is timed
BETA = 0.1


def timed(step: Callable[[], None], steps: int, *, cuda: bool) -> list[float]:
    """The seconds of each step of up to `steps`; fewer if they are long."""
    seconds: list[float] = []
    while len(seconds) < steps and sum(seconds[WARM_UP:]) < ENOUGH_SECONDS:
        start = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


class Job:
    """A scenario's model, its reference, optimizer and batch on a device, and the step that trains it.

    `s` is the scenario with every default filled in; `configs` has the config.json of `model`, and of `reference`
    where one runs.
    """

    def __init__(
        self, s: Mapping[str, Any], configs: Mapping[str, Mapping[str, Any]], device: torch.device, meter: Meter
    ) -> None:
        self.s, self.device, self.meter = s, device, meter
        self.length = s.get("seq_len") or s["prompt_len"] + s["response_len"]
        self.reference: torch.nn.Module | None = None
        same = s["roles"].get("reference") == {"model": s["model"]} if s["task"] == "dpo" else False
        self.adapter_off = s["method"] != "full" and same
        self.deepspeed = s["sharding"].startswith("zero")
        with meter.of("load"):
            self.model: Any = models.prepare(models.load(configs["model"], s, device), s, device)
            if "reference" in configs and not self.adapter_off:
                still = {**s, "optimizer": "none", "method": "full", "checkpointing": "none"}
                self.reference = models.prepare(models.load(configs["reference"], still, device), still, device)
                if s["sharding"] == "zero3":  # below stage 3 a model that is not trained stays whole
                    self.reference = zero.engine(self.reference, None, s, device)
            self.optimizer = models.optimizer(self.model.parameters(), s)
            if self.deepspeed:
                self.model = zero.engine(self.model, self.optimizer, s, device)
            self.batch = self._batch(configs["model"]["vocab_size"])
        self.accumulation = s["global_batch"] // (s["micro_batch"] * s["gpus"])

    @property
    def notes(self) -> list[str]:
        """Differences from the scenario: another kernel of attention, where its own is not installed."""
        return models.notes(self.s)

    @property
    def parameters(self) -> int:
        """The number of parameters of the model as it is trained, adapters included, whole even if it is sharded."""
        return sum(getattr(p, "ds_numel", p.numel()) for p in self.model.parameters())

    def _batch(self, vocabulary: int) -> dict[str, torch.Tensor]:
        """Random tokens: chosen rows, then as many rejected ones, where pairs are compared."""
        paired = self.s["task"] in ("rm", "dpo")
        shape = (self.s["micro_batch"] * (2 if paired else 1), self.length)
        batch = {"input_ids": torch.randint(1, vocabulary, shape, device=self.device)}
        if not paired:
            batch["labels"] = batch["input_ids"].clone()
        if self.s["task"] == "dpo" and self.s["roles"].get("reference") == "none":
            batch["reference"] = torch.zeros(shape[0], device=self.device)
        if self.s["task"] == "ppo":  # log-probabilities or values of the rollout, and targets
            for name in ("old", "target"):
                batch[name] = torch.zeros(shape[0], self.s["response_len"], device=self.device)
        return batch

    def _logits(self, model: torch.nn.Module) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=self.batch["input_ids"], use_cache=False).logits
        return logits

    def _logprobs(self, model: torch.nn.Module) -> torch.Tensor:
        """Log-probabilities, (rows, tokens): of every next token, or for PPO of the response's."""
        tokens = self.s["response_len"] if self.s["task"] == "ppo" else self.length - 1
        logits = self._logits(model)[:, -tokens - 1 : -1]
        return logprobs(logits, self.batch["input_ids"][:, -tokens:], self.s["logprob"])

    def _loss(self) -> torch.Tensor:
        pairs = self.s["micro_batch"]
        if self.s["task"] == "rm":
            return pair_loss(self._logits(self.model).squeeze(-1), pairs)
        if self.s["task"] == "dpo":
            policy = self._logprobs(self.model).sum(-1)
            return pair_loss(policy - self._reference(), pairs, BETA)
        if self.s["task"] == "ppo":
            return self._update()
        loss: torch.Tensor = self.model(**self.batch, use_cache=False).loss
        return loss

    def _update(self) -> torch.Tensor:
        """The loss of the critic's or the actor's update; the actor's scores if nothing is trained."""
        old, target = self.batch["old"], self.batch["target"]
        if models.scores(self.s):
            values = self.model(self.batch["input_ids"])[:, -old.shape[1] :].float()
            return value_loss(values, old, target)
        new = self._logprobs(self.model)
        return new.mean() if self.optimizer is None else policy_loss(new, old, target)

    def _reference(self) -> torch.Tensor:
        if self.adapter_off:
            with models.frozen(self.model) as model:
                return self._logprobs(model).sum(-1)
        if self.reference is None:
            return self.batch["reference"]
        with torch.no_grad():
            return self._logprobs(self.reference).sum(-1)

    def step(self) -> None:
        """Forward and backward of each micro batch, then the optimizer; only forward if nothing is trained."""
        for _ in range(self.accumulation):
            trained, precision = (
                torch.set_grad_enabled(self.optimizer is not None),
                models.autocast(self.s, self.device),
            )
            with self.meter.of("forward"), trained, precision:
                loss = self._loss()
            if self.optimizer is not None:
                with self.meter.of("backward"):
                    self._backward(loss)
            del loss
            if self.deepspeed:  # it counts the micro batches itself
                with self.meter.of("step"):
                    self.model.step()
        if self.deepspeed:
            if not self.model.was_step_applied():
                raise RuntimeError("DeepSpeed skipped the step")
        elif self.optimizer is not None:
            with self.meter.of("step"):
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)

    def _backward(self, loss: torch.Tensor) -> None:
        if self.deepspeed:
            self.model.backward(loss)  # DeepSpeed divides the loss itself
        else:
            (loss / self.accumulation if self.accumulation > 1 else loss).backward()

    def run(self, steps: int) -> list[float]:
        """The seconds of each step of up to `steps`; fewer if they are long."""
        return timed(self.step, steps, cuda=self.meter.cuda)
