"""Run by a Python with PyTorch: steps on the CPU with real tensors, a case a line in.

Prints what each step takes at its highest beyond what lay there before, from the allocator's own events.
"""

import json
import sys

import torch
from torch.profiler import ProfilerActivity, profile

from measurements.trace import models, step
from measurements.trace.case import from_record
from measurements.trace.ledger import Ledger

step.DEVICE = models.DEVICE = torch.device("cpu")
for line in sys.stdin:
    made = step.Step(from_record(json.loads(line)), Ledger())  # a ledger that is not entered follows nothing
    made.warm_up()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        made.run()
    live = highest = 0
    for event in seen.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            highest = max(highest, live)
    print(highest, flush=True)
