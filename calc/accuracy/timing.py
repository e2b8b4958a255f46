"""The constants of `calc.throughput` that rest on measured rates and steps of cards and their hosts.

As `calc.accuracy.calibration` does for verdicts, each function computes a constant from `measurements/`, so that an
estimate reads no records; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import mean, median
from typing import Any, NamedTuple

from calc.accuracy.megatron_golden import dispatched, records
from calc.accuracy.rl_stages import logged, staged
from calc.catalog.catalog import GPU, Catalog
from calc.memory import kv_cache
from calc.resolve.parse import parse
from calc.throughput import Term, throughput, work
from calc.throughput.rates import FLASH, GIGA, MEMORY, PCIE, rated
from calc.throughput.rollout import AHEAD_STEP, ENGINE_STEP, Engine, decode, multiplied, read, waits

LONG = 32_768  # tokens of a product that runs long enough for a card to reach its power limit, as it does in training
# Kernels of a layer as `measurements.bench` decodes: residuals, and the halves of MLP and cache, on their own
PLAIN = 14
SHORT = 512  # tokens of a cache that takes no time to read beside the weights
_H200, _H100 = "measured/h200-2026-11-22/", "measured/h100-2026-11-22/"
_LENGTHS = "llama-3-8b/sft/s{}/mb1/optimizer_impl=fused/checkpointing=full"
_NARROW = "llama-3.2-1b/sft/s{}/mb1/optimizer_impl=fused/checkpointing=none"
# Two lengths of one job, of heads of 128 and of 64: what grows with the square of the length is attention.
PAIRS = (
    (_H200 + _LENGTHS.format(8192), _H200 + _LENGTHS.format(16384)),
    (_H200 + _NARROW.format(4096), _H200 + _NARROW.format(16384)),
)
LARGE = tuple(
    card + name
    for card in (_H200, _H100)
    for name in ("llama-3-8b/sft/s2048/mb1/optimizer_impl=fused", _LENGTHS.format(8192))
)
_EACH = tuple("llama-3.2-1b/sft/s512/mb1/optimizer_impl=fused/checkpointing=" + c for c in ("none", "full"))
_QWEN = "qwen2.5-1.5b/sft/s1024/mb1/optimizer_impl=fused/attention="
# Steps so short that they wait for their host, by host.
HOSTS = {
    "of the Qwen README's A100": ("published/qwen1-1.8B-LoRA-256",),
    "of the H200": (*(_H200 + name for name in _EACH), _H200 + _QWEN + "sdpa"),
    "of the H100": (*(_H100 + name for name in _EACH), _H100 + _QWEN + "eager"),
}
NARROW = 512  # the width of layers that a card computes sooner than any host dispatches them
_FAMILIES = "measured/h200-2026-11-26/{}/sft/s{}/mb{}/optimizer_impl=fused/checkpointing={}"
# Every other model of the suite; the rest judge.
CHOSEN = tuple(
    _FAMILIES.format(model, 2048, 1, "selective")
    for model in ("opt-1.3b", "gemma-3-270m", "falcon-h1-0.5b", "olmoe-1b-7b", "stablelm-2-1.6b", "phi-1.5")
)
WINDOWED = _FAMILIES.format("starcoder2-3b", 8192, 2, "full")
# 8-bit moments: one model whose steps wait for the host, and one whose do not
PACKED = (
    _H200 + "qwen2.5-1.5b/sft/s2048/mb1/checkpointing=full/optimizer=adamw-8bit",
    "measured/h200-torchtune-2026-11-27/llama-3.2-1b/sft/s2048/mb2/trainer=torchtune/optimizer_in_backward=False/"
    "optimizer=adamw-8bit",
)
SET = {
    "EIGHT_BIT_STEP": frozenset(PACKED),
    "POLICY": frozenset(CHOSEN),
    "MASKED": frozenset({WINDOWED}),
    "FLASH": frozenset(name for pair in PAIRS for name in pair),
    "EAGER": frozenset(LARGE),
    "LAUNCH": frozenset(name for names in HOSTS.values() for name in names),
}


class Rate(NamedTuple):
    """A measured rate: the card, the model whose shapes it has, and the row of the record."""

    gpu: GPU
    model: str
    row: Mapping[str, Any]


class Ran(NamedTuple):
    """A measured step, in seconds, its card, and the terms of its estimate by name."""

    gpu: GPU
    seconds: float
    terms: Mapping[str, Term]

    def without(self, *names: str) -> float:
        """Seconds that are left of the step once all estimated terms but those in `names` are subtracted."""
        return self.seconds - sum([t.seconds for name, t in self.terms.items() if name not in names])


def rates(catalog: Catalog, op: str) -> Iterator[Rate]:
    """The measured rates of one kind of work: `matmul`, `decode`, or the beginning of a copy's name."""
    for record in catalog.measurements:
        for row in record.get("rates", ()):
            if row["op"].startswith(op):
                yield Rate(catalog.gpu(record["machine"]["gpu"]), record["scenario"]["model"], row)


def ran(catalog: Catalog, name: str) -> Ran:
    """The record with the id `name` beside its estimate, on the card that it ran on."""
    record = next(r for r in catalog.measurements if r["id"] == name)
    s = parse(record["scenario"], where=name, catalog=catalog)
    t = throughput(s, catalog.gpu(s.gpu), None)
    own = record.get("measured_rate", {}).get("value")
    return Ran(catalog.gpu(s.gpu), own or record["observed"]["step_seconds"], {term.name: term for term in t.terms})


def matrix(catalog: Catalog) -> float:
    """`rates.MATRIX` of Hopper: the median share of the peak, over models, of all their products of `LONG` tokens."""
    models: dict[str, list[Rate]] = {}
    for rate in rates(catalog, "matmul"):
        if rate.row["tokens"] == LONG:
            models.setdefault(rate.model, []).append(rate)
    return float(median(share(products) for products in models.values()))


def share(products: Iterable[Rate]) -> float:
    """The share of the card's peak that `products` reach, run one after another."""
    done = [
        (2 * r.row["tokens"] * r.row["inputs"] * r.row["outputs"] / peak(r.gpu), r.row["seconds"]) for r in products
    ]
    return float(sum([least for least, _ in done]) / sum([seconds for _, seconds in done]))


def memory(catalog: Catalog) -> float:
    """`rates.MEMORY`, by copies within a card."""
    return float(median(r.row["gbs"] / copy_peak(r) for r in rates(catalog, "copy device to device")))


def pcie(catalog: Catalog) -> float:
    """`rates.PCIE_COPY`, by copies from and to pinned memory."""
    found = [r for way in ("pinned host to device", "device to pinned host") for r in rates(catalog, f"copy {way}")]
    return float(median(r.row["gbs"] / copy_peak(r) for r in found))


def copy_peak(r: Rate) -> float:
    """GB/s that a copy could reach: the bandwidth of the card's memory, or of its slot in one direction."""
    return PCIE[r.gpu.pcie_gen or 4] if "host" in r.row["op"] else float(r.gpu.bandwidth_gbs or 0)


def start(catalog: Catalog) -> float:
    """`work.START`: seconds for each kernel that decoding one sequence takes beyond moving its bytes.

    It is the median over models and cards. A step runs from a CUDA graph, so that no host is waited for.
    """
    left = []
    for gpu, model, row in rates(catalog, "decode"):
        if row["batch"] == 1 and row["kv_len"] == SHORT:
            arch = catalog.model(model).architecture
            left.append((row["seconds"] - decoding(catalog, gpu, model, row)) / (arch.layers * PLAIN))
    return float(median(left))


def decoding(catalog: Catalog, gpu: GPU, model: str, row: Mapping[str, Any], kernel: float = 0.0) -> float:
    """Seconds that a decoding step takes to move its bytes, and `kernel` seconds for the start of each kernel."""
    arch = catalog.model(model).architecture
    c = work.counts(arch, "lm")
    moved = 2 * (c.layers + c.head) + row["batch"] * row["kv_len"] * kv_cache.token_bytes(arch)
    return float(moved) / ((gpu.bandwidth_gbs or 0) * GIGA * MEMORY) + kernel * arch.layers * PLAIN


def flash(catalog: Catalog) -> float:
    """`rates.FLASH` of Hopper: the mean over `PAIRS`.

    Of a step's terms attention alone grows with the square of the length, and the optimizer and kernel starts not at
    all: the longer step less m times the shorter is m² - m attentions of the shorter, less m - 1 times what is fixed.
    """
    shares = []
    for pair in PAIRS:
        short, long = (ran(catalog, name) for name in pair)
        m = long.terms["attention"].values["T"] / short.terms["attention"].values["T"]
        fixed = short.terms["optimizer"].seconds + short.terms["kernel starts"].seconds
        once = (long.seconds - m * short.seconds + (m - 1) * fixed) / (m * m - m)
        estimated = short.terms["attention"]
        shares.append(estimated.seconds * estimated.values["F"] / once / peak(short.gpu))
    return float(mean(shares))


def eager(catalog: Catalog) -> float:
    """`rates.EAGER` of Hopper, in bytes a second: the median over steps of an 8B model.

    The element-wise kernels of a step get the time that its other terms leave.
    """
    found = []
    for name in LARGE:
        step = ran(catalog, name)
        known = step.terms["element-wise"]
        found.append(known.seconds * known.values["B"] / step.without("element-wise"))
    return float(median(found))


def launches(catalog: Catalog) -> dict[str, float]:
    """Seconds that each host takes to dispatch an operation: the median over its shortest steps."""
    found = {}
    for host, names in HOSTS.items():
        each = []
        for name in names:
            step = ran(catalog, name)
            launch = step.terms["launch"].values
            busy = launch["G"] + step.without("launch")  # host time: hidden behind the card's work, and alone
            each.append(busy / (launch["m"] * launch["k"]))
        found[host] = median(each)
    return found


def megatron_launch() -> float:
    """`work.MEGATRON_LAUNCH`: seconds of a host for each operation that Megatron-core's layers dispatch.

    It is the median over the runs of Megatron-LM's tests whose layers are so narrow that steps wait for the host,
    without Megatron-FSDP, whose hooks and collectives are no operations of the layers, and with AdamW, whose step is a
    few kernels.
    """
    apart = {"use-megatron-fsdp", "optimizer"}
    plain = [run for run in records() if not apart & run["arguments"].keys()]
    narrow = [run for run in plain if run["arguments"]["hidden-size"] <= NARROW]
    return float(median(run["iteration_seconds"] / dispatched(run) for run in narrow))


def policy(catalog: Catalog) -> float:
    """`work.POLICY`: what a step takes beyond its dispatches, for each decided operation: the median over `CHOSEN`."""
    found = []
    for name in CHOSEN:
        step = ran(catalog, name)
        chosen = step.terms[work.SELECTION].values
        host = chosen["G"] + step.without("launch", work.SELECTION)  # of which all is the host's in steps so short
        found.append((host / chosen["m"] - chosen["k"] * chosen["t"]) / chosen["d"])
    return float(median(found))


def ahead_step(catalog: Catalog) -> float:
    """`rollout.AHEAD_STEP`: what a step of one sequence takes beyond its other terms."""
    return AHEAD_STEP + dict(steps_ahead(catalog))[1]


def ahead_sequence(catalog: Catalog) -> float:
    """`rollout.AHEAD_SEQUENCE`: what steps of several sequences take beyond their other terms, for each: the median."""
    return float(median(left / batch for batch, left in steps_ahead(catalog) if batch > 1))


def steps_ahead(catalog: Catalog) -> Iterator[tuple[int, float]]:
    """Of each measured step of vLLM: its sequences, and the seconds beyond its bytes, products and kernel starts.

    Steps that return log-probabilities are left out: those of 512 sequences wait for another process that reads them.
    """
    for gpu, model, row in rates(catalog, "vllm step"):
        if row["op"] == "vllm step":
            arch, n, r = catalog.model(model).architecture, row["batch"], rated(gpu, None, 1, "bf16")
            token, host = kv_cache.read_bytes(arch, row["kv_len"]), waits(arch, 1, r, Engine(n, n, ahead=True))
            known = decode(
                n, 1, 1, row["kv_len"], n, read(arch, n, 1), token, r.memory, host, 0, multiplied(arch), r.matrix
            )
            yield n, row["seconds"] - known.seconds


def sequence(catalog: Catalog) -> float:
    """`rollout.SEQUENCE`: what rollouts take beyond their other terms, for each step of each sequence: the median."""
    return float(median(left / (decoded["S"] * decoded["R"]) for left, decoded in _rollouts(catalog, "SEQUENCE", "q")))


def eager_layer(catalog: Catalog) -> float:
    """`rollout.EAGER`: seconds of each layer in each step of rollouts without CUDA graphs: the median."""
    found = []
    for left, decoded in _rollouts(catalog, "EAGER", "t"):
        found.append((left / decoded["steps"] - ENGINE_STEP + decoded["W"] / decoded["B"]) / decoded["layers"])
    return float(median(found))


def eight_bit_step(catalog: Catalog) -> float:
    """`training.EIGHT_BIT_STEP`: what steps of `PACKED` take beyond their other terms, for each parameter: the mean."""
    found = []
    for name in PACKED:
        step = ran(catalog, name)
        known = step.terms["8-bit states"].values
        found.append(step.without("8-bit states") * known["N"] / known["P"])
    return float(mean(found))


def unit(catalog: Catalog) -> float:
    """`work.UNIT`: what scoring and updates take beyond their other terms, for each unit in each pass: the median."""
    found = []
    for _, seconds, terms in _setting(catalog, "UNIT"):
        units = [t for t in terms if t.name.endswith(": units")]
        left = seconds - sum([t.seconds for t in terms if t not in units])
        found.append(left / sum([t.seconds / t.values["u"] for t in units]))
    return float(median(found))


def _setting(catalog: Catalog, constant: str) -> Iterator[tuple[Mapping[str, Any], float, list[Term]]]:
    """Of each stage of a log that sets a constant: its record, its seconds, and its estimated terms."""
    for record in catalog.measurements:
        told = record.get("measured_stages", {})
        for stage, sets in told.get("calibrates", {}).items():
            if sets == constant:
                yield record, logged(told[stage]), staged(record, catalog)[stage]


def _rollouts(catalog: Catalog, sets: str, without: str) -> Iterator[tuple[float, Mapping[str, float]]]:
    """Of each rollout that sets a constant: the seconds left beyond its terms, decoding without the seconds of the
    value `without`; and the values of decoding, with the numbers of layers and of steps.
    """
    for record, seconds, terms in _setting(catalog, sets):
        decoded = next(t for t in terms if t.name == "rollout: decode").values
        steps = decoded["S"] * decoded["R"] / decoded["c"] + decoded["X"] - decoded["R"]
        times = {"q": decoded["S"] * decoded["R"], "t": steps}[without]
        left = seconds - sum([t.seconds for t in terms])
        layers = catalog.model(record["scenario"]["model"]).architecture.layers
        yield left + times * decoded[without], {**decoded, "layers": layers, "steps": steps}


def masked(catalog: Catalog) -> float:
    """`rates.MASKED` of Hopper: attention with a mask gets the time that the other terms of `WINDOWED` leave."""
    step = ran(catalog, WINDOWED)
    known = step.terms["masked attention"]
    rate = known.seconds * known.values["F"] / step.without("masked attention")
    return float(rate / (peak(step.gpu) * FLASH["Hopper"]))


def peak(gpu: GPU) -> float:
    """A card's peak rate of 16-bit matrix products, in operations a second."""
    return (gpu.bf16_tflops or gpu.fp16_tflops or 0) * 1e12
