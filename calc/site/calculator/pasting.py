"""The page where a job that died is pasted: its text area, and the worked example, which stands without JavaScript."""

from __future__ import annotations

from html import escape

from calc.answers import answers
from calc.answers.answers import Answer
from calc.launch import launch
from calc.site.calculator import diagnosed, page
from calc.site.calculator.calculator import Place

# The end of a log: what a job on DeepSpeed leaves when it runs out in backward, without the figures of any one run.
TRACEBACK = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "openrlhf/trainer/sft_trainer.py", line 186, in fit
[rank0]:     self.strategy.backward(loss, self.model, self.optimizer)
[rank0]:   File "torch/autograd/graph.py", line 824, in _engine_run_backward
[rank0]: torch.OutOfMemoryError: CUDA out of memory."""


def show(died: Answer, place: Place) -> str:
    """The door's HTML with the diagnosis of a job's command and log, on one line, so that Markdown leaves it alone."""
    s = died.scenario
    text = f"{launch(s).command}\n\n{TRACEBACK}\n\n{answers.catalog().gpu(s.gpu).name}"
    *_, shown = diagnosed.find(text, {"gpu": s.gpu}, answers.catalog(), place)
    offline = "Without JavaScript this page has this one example; the command line has every other."
    inner = f'{_form(text)}<p class="offline">{offline}</p><div class="answer">{shown.html}</div>'
    return page.box("diagnose", place, (), inner)


def _form(text: str) -> str:
    inner = escape(text).replace("\n", "&#10;")
    return (
        '<form class="pasted" aria-label="Diagnosis" autocomplete="off">'
        "<label>A launch command, an error message, the end of a log, or a scenario; a file can be dropped here"
        f'<textarea name="text" rows="14" spellcheck="false">&#10;{inner}</textarea></label>'
        '<p class="buttons"><button type="submit" class="md-button md-button--primary">Diagnose</button> '
        '<button type="button" class="md-button clear">Clear</button> '
        '<button type="button" class="md-button stop" hidden>Stop</button></p>'
        '<p class="state" role="status" aria-live="polite"></p></form>'
    )
