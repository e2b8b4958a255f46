"""The diagnosis of a job that died: a pasted command, error, log or scenario read as a job, with phase, cause and
remedies.

`reading` finds the parts of a text, with a module for the flags of each framework, one for Python code (`scripts`) and
one for what is said in passing (`hints`); `job` makes a scenario of them; `diagnosis` computes it, and `remedies` what
to change.
"""

from __future__ import annotations

from calc.diagnose.diagnosis import Diagnosis, diagnose, growing

__all__ = ["Diagnosis", "diagnose", "growing"]
