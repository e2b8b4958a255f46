"""The memory that is free at the first loss, by which Unsloth counts its chunks."""

from __future__ import annotations

from typing import Any

from calc.base.units import GiB
from calc.catalog.catalog import load
from calc.estimate.estimate import estimate
from calc.memory.runtime import process
from calc.resolve.parse import parse
from calc.step import first_loss
from calc.step.roles import Job, Roles

JOB: dict[str, Any] = {
    "model": "gemma-3-270m", "task": "sft", "framework": "torch", "trainer": "unsloth", "gpu": "t4", "method": "lora",
    "precision": "fp16", "lora": {"rank": 16}, "micro_batch": 4, "seq_len": 4096, "padding_free": False,
    "versions": {"unsloth": "2025.12.8", "transformers": "4.57", "torch": "2.9"},
}  # fmt: skip


def buffer(**changes: Any) -> int:
    s = parse({**JOB, **changes}, catalog=load())
    return Job(s, load().gpu(s.gpu)).keeps.roles[0].path.buffer


def test_free_is_what_the_process_and_the_most_of_loading_and_forward_leave() -> None:
    s, gpu = parse(JOB, catalog=load()), load().gpu("t4")
    roles = Roles(s)
    (placed,) = roles.placed.values()
    step = roles.step(placed.engine.replica, placed.s, roles.batch(placed.s, placed.role.rows))
    left = gpu.usable_bytes - first_loss.free(placed, step, gpu)
    outside = sum(line.bytes for line in process(gpu.architecture, 0, gpu.linked))
    loaded = sum(line.bytes for line in placed.engine.weights())
    states = sum(line.bytes for line in placed.engine.states())
    layers = step.plan.layout
    kept = sum(line.bytes for line in step.lines(layers.waiting()))
    # the states of Adam come later; a layer's forward adds its temporaries to what all layers keep
    assert states > 0
    assert outside + loaded + kept < left < outside + loaded + kept + 4 * GiB


def test_a_larger_card_has_larger_chunks_and_the_whole_of_what_it_can() -> None:
    """16,384 tokens of 262,144 entries: 16 GiB of fp32 logits, which are one chunk where 16 GiB are free, or more."""
    assert buffer() < buffer(gpu="l4") == buffer(gpu="a100-80-sxm") == 16 * GiB


def test_packs_are_full_and_have_the_chunks_of_their_tokens() -> None:
    """32 sequences of 2,048 tokens and 128,256 entries: 31 GiB of fp32 logits, in four chunks; shorter ones are one."""
    llama = {"model": "llama-3.2-1b", "gpu": "l4", "precision": "bf16", "micro_batch": 32, "seq_len": 2048}
    assert buffer(**llama, packing=True) == 16_384 * 128_256 * 4 < buffer(**llama)


def test_chunks_of_a_release_before_do_not_depend_on_the_card() -> None:
    old = {"versions": {**JOB["versions"], "unsloth": "2025.8.9", "torch": "2.8"}}
    assert buffer(**old) == buffer(**old, gpu="a100-80-sxm") == 2 * GiB


def test_the_estimate_of_a_card_has_its_own_chunks() -> None:
    """Of one scenario on two cards, asked in either order."""

    def most(gpu: str) -> int:
        found = estimate(parse({**JOB, "gpu": gpu}, catalog=load()), load())
        return max(phase.moment.allocated_bytes for group in found.groups for phase in group.phases)

    small = most("t4")
    assert most("a100-80-sxm") - small > 5 * GiB and most("t4") == small
