"""Measures scenarios on the GPU at hand: `python -m measurements.bench SUITE.yaml --out FILE.jsonl`.

`plan` reads a suite into cases, `__main__` runs each in a fresh process (`pool`) and writes a record (`record`), and
`edge` finds the largest size that runs. `worker` is that process: only it needs PyTorch, with `model`, `zero`, `steps`
and `rates`, and it imports nothing of `calc`, so it may run in another Python than the rest.
"""
