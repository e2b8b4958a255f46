"""Run by a Python with PyTorch: a step of two linear layers on fake tensors; prints each phase's peak, by kind too."""

import json
import sys
from functools import partial

from measurements.trace import fake  # noqa: F401  (before anything imports torch)

import torch  # isort: skip

from measurements.trace.ledger import Event, Ledger, highest  # isort: skip
from measurements.trace.step import fake_mode  # isort: skip


def within(phase: str, index: int, event: Event) -> bool:
    return event.phase == phase


def step() -> None:
    ledger.phase = "forward"
    hidden = torch.nn.functional.linear(x, first)
    active = torch.relu(hidden)
    del hidden
    out = torch.nn.functional.linear(active, second)
    del active
    loss = out.sum()
    del out
    ledger.phase = "backward"
    loss.backward()
    del loss
    ledger.phase = "optim"
    ledger.note("optim")
    optimizer.step()
    optimizer.zero_grad()


with fake_mode(), Ledger() as ledger:
    first = torch.empty(1024, 1024, device="cuda", requires_grad=True)
    second = torch.empty(256, 1024, device="cuda", requires_grad=True)
    x = torch.empty(256, 1024, device="cuda")
    optimizer = torch.optim.AdamW([first, second], **{sys.argv[1]: True})
    step()
    ledger.start()
    step()
peaks = {phase: highest(ledger.events, partial(within, phase)) for phase in ("forward", "backward", "optim")}
print(json.dumps({phase: moment.bytes for phase, moment in peaks.items()}))
