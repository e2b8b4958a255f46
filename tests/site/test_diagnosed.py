"""The diagnosis as HTML: what the browser is answered is what the command line says, and pasted text stays text."""

from __future__ import annotations

import json
from typing import Any

from calc.answers import answers
from calc.catalog.catalog import load
from calc.diagnose import diagnose
from calc.site.calculator import browser, diagnosed, pasting
from calc.site.calculator.calculator import Place
from calc.site.tables import tables

PLACE = Place("", tables.to_html)
TEXT = (
    "deepspeed --num_gpus 4 --module openrlhf.cli.train_sft --pretrain meta-llama/Meta-Llama-3-8B --max_len 2048 "
    "--micro_train_batch_size 8 --train_batch_size 128 --zero_stage 2 --bf16 --flash_attn --packing_samples\n"
    "  loss.backward()\ntorch.OutOfMemoryError: CUDA out of memory."
)


def asked(**question: Any) -> dict[str, Any]:
    return json.loads(browser.answer(json.dumps({"root": "", **question}), print))  # type: ignore[no-any-return]


def test_the_browser_is_answered_as_the_command_line_is() -> None:
    found = asked(diagnose=TEXT, fields={"gpu": "a100-80-sxm", "host_memory": "512"})
    own = diagnose(TEXT, {"gpu": "a100-80-sxm", "host_memory": 512}, load())
    assert own.cause.partition(":")[0] in found["html"]
    for remedy in own.remedies:
        assert " + ".join(remedy.names) in found["html"]
    assert "<code>--micro_train_batch_size 8</code> → <code>--micro_train_batch_size" in found["html"]
    assert found["line"].startswith("out of memory in ")


def test_what_is_recognised_comes_first_and_remedies_are_added_at_its_end() -> None:
    question = {"root": "", "diagnose": TEXT, "fields": {"gpu": "a100-80-sxm", "host_memory": "512"}}
    first, last = (json.loads(part) for part in browser.parts(json.dumps(question), print))
    assert (first["stage"], last["stage"]) == ("growing", "whole")
    assert 'class="headline"' in first["html"] and "Cause" in first["html"] and 'name="micro_batch"' in first["html"]
    assert diagnosed.REMEDIES not in first["html"] and diagnosed.REMEDIES in last["html"]
    assert last["html"].startswith(first["html"]) and last["line"].startswith(first["line"])


def test_what_was_read_is_a_form_to_complete() -> None:
    html = asked(diagnose=TEXT, fields={})["html"]
    assert '<option value="llama-3-8b" selected>' in html
    assert 'name="micro_batch" value="8"' in html
    assert '<label class="sharding">Sharding <select name="sharding">' in html
    assert '<option value="zero2" selected>ZeRO-2</option>' in html
    assert "Which GPU?" in html


def test_text_in_which_nothing_is_recognised_is_one_line() -> None:
    assert asked(diagnose="a poem", fields={})["error"].startswith(
        "your text: given text in which nothing is recognised"
    )
    assert asked(diagnose=TEXT, fields={"gpus": "many"})["error"].startswith("fields: gpus: given 'many'")


def test_pasted_text_stays_text() -> None:
    evil = TEXT.replace("meta-llama/Meta-Llama-3-8B", "<img/src=x>") + "\n<script>alert(1)</script> loss.backward(<b>)"
    html = asked(diagnose=evil, fields={"gpu": "a100-80-sxm"})["html"]
    assert "<script" not in html and "<img" not in html and "<b>)" not in html


def test_the_worked_example_stands_without_javascript() -> None:
    job = {"model": "llama-3-8b", "task": "sft", "framework": "openrlhf", "gpu": "a100-80-sxm", "gpus": 4,
           "sharding": "zero2", "micro_batch": 8, "global_batch": 128, "seq_len": 2048}  # fmt: skip
    html = pasting.show(answers.ask(job, "test"), PLACE)
    assert "\n" not in html
    for part in (f'id="{diagnosed.REMEDIES}"', f'id="{diagnosed.PHASES}"', "train_sft", 'class="offline"', "method/"):
        assert part in html
