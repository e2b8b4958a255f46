"""The configuration to run: a search over what the framework can do, with time, margin, and what the next faster lacks.

`recommend` answers for one machine, `calc.recommend.machines` for the smallest one that runs a job. The search is
described in `calc.recommend.search`, its choices in `calc.recommend.space`.

Full fine-tuning, LoRA and QLoRA do not train the same model: time ranks configurations within a method only. Where the
method is left open the answer is full fine-tuning if that fits anywhere, first with AdamW, then with 8-bit AdamW,
unless what comes first has to leave its optimizer on the host and takes too long (`calc.recommend.problem`); LoRA and
QLoRA are shown as alternatives, and become the answer only where full fine-tuning does not fit.
"""

from __future__ import annotations

from calc.recommend.answer import Recommendation, recommend
from calc.recommend.machines import Machine, Smallest, smallest
from calc.recommend.problem import Configuration, Miss

__all__ = ["Configuration", "Machine", "Miss", "Recommendation", "Smallest", "recommend", "smallest"]
