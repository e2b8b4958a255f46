"""My job died, in Chromium: a verdict with remedies after one paste, and again with a field completed."""

from __future__ import annotations

from axe import RULES, shuts_nobody_out
from browsing import opened, until
from playwright.sync_api import Browser

DIED = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen2.5-7B "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 data.max_response_length=4096 trainer.n_gpus_per_node=8\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total capacity of 39.39 GiB"
)


def test_one_paste_gives_a_verdict_with_remedies(browser: Browser, origin: str) -> None:
    page, requests, complaints = opened(browser, f"{origin}/diagnose.html", viewport={"width": 1280, "height": 900})
    assert page.locator("#diagnose-remedies tbody tr").count() > 2  # the worked example, before anything is loaded
    page.fill("#diagnose textarea", DIED)
    page.click("#diagnose .pasted button[type=submit]")
    until(
        page,
        "document.querySelector('#diagnose .headline')?.textContent.includes('Qwen2.5 7B, GRPO on 8')",
        seconds=120,
    )
    until(page, "document.querySelector('#diagnose .stop').hidden", seconds=120)
    assert page.locator("#diagnose-remedies tbody tr").count() > 1
    assert "fits" in (page.locator("#diagnose-remedies tbody").text_content() or "")
    page.select_option("#diagnose .fields select[name=gpu]", "h200")
    page.click("#diagnose .fields button[type=submit]")
    until(page, "document.querySelector('#diagnose .headline').textContent.includes('H200')", seconds=60)
    until(page, "document.querySelector('#diagnose .stop').hidden", seconds=120)
    shuts_nobody_out(page, "#diagnose", [*RULES, "best-practice"])
    assert [r for r in requests if not r.startswith((origin, "data:", "blob:"))] == []
    assert complaints == []
    page.context.close()
