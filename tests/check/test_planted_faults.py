"""Faults as maintainers make them in data files: `python -m calc check` stops each in one line with file and field."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import planted
import pytest
from commands import Run
from planted import RECORDS, Fault, config, line, put, record, swap, value, whole

from calc.catalog.catalog import CatalogError, load
from calc.check import check

H100, A10, L4, V100, A100, MI300 = (
    f"hardware/gpus/{name}.yaml" for name in ("h100-sxm", "a10", "l4", "v100-32", "a100-80-sxm", "mi300x")
)
HGX, DGX1, CONSUMER = (f"hardware/nodes/{name}.yaml" for name in ("hgx-h100", "dgx-1-v100", "consumer-pcie"))
LLAMA, MOE, OSS, STAR, DEEPSEEK, SEEING = (
    f"models/{name}.yaml"
    for name in ("llama-3-8b", "qwen3-30b-a3b", "gpt-oss-20b", "starcoder2-7b", "deepseek-v3", "qwen2.5-vl-7b")
)
UNSAID, GOLDEN, PEERS, SUITE = (f"measurements/{name}" for name in planted.BESIDE[:4])
PUBLISHED = "measurements/published.jsonl"
NAMES = "given a file of this name, allowed: names that end in "
SHOWS = "allowed: UTF-8 text that shows all it holds, lines that end in"
SOURCE = "allowed: an http(s) address, or the title of a document"


def like(name: str) -> bytes:
    """A file of the project, to be copied."""
    return (planted.ROOT / name).read_bytes()


GPU_FAULTS = [
    # units
    Fault("bandwidth in TB/s", H100, value("bandwidth_gbs", 3.35), ": bandwidth_gbs: given 3.35, allowed: 120 to 7350"),
    Fault("bandwidth in MB/s", H100, value("bandwidth_gbs", 3350000), ": bandwidth_gbs: given 3.35e+06, allowed: "),
    Fault("bandwidth in Gb/s", H100, value("bandwidth_gbs", 26800), ": bandwidth_gbs: given 26800, allowed: "),
    Fault("bandwidth lost a digit", L4, value("bandwidth_gbs", 30), ": bandwidth_gbs: given 30, allowed: 36 to "),
    Fault(
        "rates in PFLOPS", H100, value("dense_tflops.bf16", 0.989), ": dense_tflops.bf16: given 0.989, allowed: 33.5 ",
    ),
    Fault("rates in GFLOPS", H100, value("dense_tflops.bf16", 989000), ": dense_tflops.bf16: given 989000, allowed: "),
    Fault("rate with sparsity", H100, value("dense_tflops.bf16", 1979), ": dense_tflops.bf16: given 1979, allowed: "),
    Fault(
        "sparse rate of a small card", L4, value("dense_tflops.bf16", 242), ": dense_tflops.bf16: given 242, allowed: ",
    ),
    Fault(
        "memory in MB of 10^6", H100, value("memory.smi_mib", 85899), ": memory.smi_mib: given 85899, allowed: 73728",
    ),
    Fault("memory in GiB", H100, value("memory.smi_mib", 80), ": memory.smi_mib: given 80, allowed: 73728 to 81920"),
    Fault(
        "memory in bytes", H100, value("memory.smi_mib", 85520809984), ": memory.smi_mib: given 85520809984, allowed: ",
    ),
    Fault("usable memory in GiB", H100, value("memory.usable_mib", 79), ": memory.usable_mib: given 79, allowed: "),
    Fault("memory sold in MiB", H100, value("memory.marketing_gb", 81920), ": memory.smi_mib: given 81559, allowed: "),
    Fault(
        "seen on no day", H100, value("tdp_w", "NVIDIA, https://www.nvidia.com/h100 (seen 2026-02-30)", "source"),
        ": tdp_w.source: given '2026-02-30', allowed: a day of the calendar",
    ),
    Fault("power in kW", H100, value("tdp_w", 0.7), ": tdp_w.value: given 0.7, allowed: an integer of at least 1"),
    Fault("power of another digit", H100, value("tdp_w", 7000), ": tdp_w: given 7000, allowed: 168 to 3350 W"),
    Fault("link in Gb/s", H100, value("nvlink_gbs", 7200), ": nvlink_gbs: given 7200, allowed: 128 to 1350 GB/s"),
    Fault("link in TB/s", H100, value("nvlink_gbs", 0.9), ": nvlink_gbs: given 0.9, allowed: 128 to 1350 GB/s"),
    Fault("link below the slot", A100, value("nvlink_gbs", 60), ": nvlink_gbs: given 60, allowed: 64 to 900 GB/s"),
    Fault("lanes for a generation", H100, value("pcie_gen", 16), ": pcie_gen: given 16, allowed: 5, which Hopper has"),
    # one field beside another
    Fault(
        "usable above what is shown", A10, value("memory.usable_mib", 23552),
        ": memory.usable_mib: given 23552, allowed: at",
    ),
    Fault(
        "usable far below", MI300, value("memory.usable_mib", 163840),
        ": memory.usable_mib: given 163840, allowed: 176948",
    ),
    Fault(
        "usable unlike its source", A10, value("memory.usable_mib", 22571),
        ": memory.usable_mib: given 22571, allowed: 22518",
    ),
    Fault(
        "shown and usable swapped", L4, swap("value: 23034", "value: 22000"),
        ": memory.smi_mib: given 22000, allowed: ",
    ),
    Fault(
        "fp8 below bf16", H100, value("dense_tflops.fp8", 494), ": dense_tflops.fp8: given 494, allowed: 1978, twice",
    ),
    Fault(
        "fp16 with fp16 sums", L4, value("dense_tflops.fp16", 150), ": dense_tflops.fp16: given 150, allowed: 121, as",
    ),
    Fault(
        "bf16 on Volta", V100, value("dense_tflops.bf16", 125),
        ": dense_tflops.bf16: given 125, allowed: 0, for none: Volta",
    ),
    Fault(
        "fp8 on Ampere", A100, value("dense_tflops.fp8", 624),
        ": dense_tflops.fp8: given 624, allowed: 0, for none: Ampere",
    ),
    Fault(
        "no fp8 on Hopper", "hardware/gpus/h100-sxm.yaml", value("dense_tflops.fp8", 0),
        ": dense_tflops.fp8: given 0, allowed: a rate, or none given: Hopper has fp8",
    ),
    Fault(
        "another card's memory", A100, value("memory.marketing_gb", 88),
        ": memory.usable_mib: given 81050, allowed: 81101",
    ),
    Fault(
        "memory unlike the name", A100, swap("name: A100-SXM4-80GB", "name: A100-SXM4-40GB"),
        ": memory.marketing_gb: given 80",
    ),
    Fault(
        "ECC of another kind", H100, value("ecc", "on, inline"),
        ": ecc: given 'on, inline', allowed: on, inline, where",
    ),
    Fault(
        "vendor of another", H100, swap("vendor: NVIDIA", "vendor: AMD"),
        ": vendor: given 'AMD', allowed: NVIDIA, which",
    ),
    # words
    Fault(
        "misspelt architecture", H100, value("architecture", "Hoper"),
        ": architecture.value: given 'Hoper', allowed: Pascal",
    ),
    Fault(
        "architecture by its chip", H100, value("architecture", "GH100"),
        ": architecture.value: given 'GH100', allowed: ",
    ),
    Fault(
        "no source", H100, swap("  source: NVIDIA H100 Tensor", "  sauce: NVIDIA H100 Tensor"),
        ": unknown field 'architecture.sauce'; did you mean 'architecture.source'?",
    ),
    Fault(
        "source todo", H100, value("tdp_w", "todo", "source"),
        ": tdp_w.source: given 'todo', allowed: text of at least",
    ),
    Fault(
        "source of one word", H100, value("tdp_w", "datasheet", "source"),
        f": tdp_w.source: given 'datasheet', {SOURCE}",
    ),
    Fault(
        "source to be trusted", H100, value("tdp_w", "trust me on this", "source"),
        f": tdp_w.source: given 'trust me on this', {SOURCE}",
    ),
    Fault(
        "source to be written", H100, value("tdp_w", "TODO find the datasheet", "source"),
        f": tdp_w.source: given 'TODO find the datasheet', {SOURCE}",
    ),
    Fault(
        "address without a host", H100, value("tdp_w", "https://datasheets/h100", "source"),
        f": tdp_w.source: given 'https://datasheets/h100', {SOURCE}",
    ),
    Fault(
        "address without a scheme", H100, value("tdp_w", "www.nvidia.com/h100", "source"),
        f": tdp_w.source: given 'www.nvidia.com/h100', {SOURCE}",
    ),
    Fault(
        "example address", H100, value("tdp_w", "https://example.com/h100", "source"),
        f": tdp_w.source: given 'https://example.com/h100', {SOURCE}",
    ),
    Fault(
        "source that a search found", H100, value("tdp_w", "https://www.google.com/search?q=h100+tdp", "source"),
        f": tdp_w.source: given 'https://www.google.com/search?q=h100+tdp', {SOURCE}",
    ),
    Fault(
        "source that a chat said", H100, value("tdp_w", "https://chatgpt.com/share/67a1", "source"),
        f": tdp_w.source: given 'https://chatgpt.com/share/67a1', {SOURCE}",
    ),
    Fault(
        "note to be written", A10, value("memory.usable_mib", "TODO other logs", "note"),
        ": memory.usable_mib.note: given 'TODO other logs'",
    ),
    # numbers
    Fault(
        "comma decimal", H100, value("bandwidth_gbs", "3,35"), ": bandwidth_gbs.value: given '3,35', allowed: a number",
    ),
    Fault(
        "quoted number", H100, value("bandwidth_gbs", '"3350"'),
        ": bandwidth_gbs.value: given '3350', allowed: a number",
    ),
    Fault(
        "number with its unit", H100, value("bandwidth_gbs", "3350 GB/s"),
        ": bandwidth_gbs.value: given '3350 GB/s', allowed",
    ),
    Fault("zero", H100, value("bandwidth_gbs", 0), ": bandwidth_gbs.value: given 0, allowed: a number above 0"),
    Fault("negative", H100, value("tdp_w", -700), ": tdp_w.value: given -700, allowed: an integer of at least 1"),
    Fault(
        "not a number", H100, value("bandwidth_gbs", ".nan"), ": bandwidth_gbs.value: given '.nan', allowed: a number",
    ),
    Fault(
        "infinite", H100, value("bandwidth_gbs", "1e999"), ": bandwidth_gbs.value: given a number that is not finite",
    ),
    Fault(
        "empty value", H100, value("bandwidth_gbs", ""), ": bandwidth_gbs.value: given null, allowed: a number above 0",
    ),
    # names and files
    Fault(
        "copied id", "hardware/gpus/h100-nvl.yaml", whole(like(H100)),
        ": id: given 'h100-sxm', already the id of hardware/gpus/h100-sxm.yaml, allowed: 'h100-nvl'",
    ),
    Fault(
        "rates with fp16 sums", "hardware/gpus/rtx4090.yaml",
        lambda raw: value("dense_tflops.bf16", 330.3)(value("dense_tflops.fp16", 330.3)(raw)),
        ": dense_tflops.bf16: given 330.3, allowed: 10.1 to 248 TFLOPS",
    ),
    Fault(
        "source on somebody's disk", H100, value("tdp_w", "/home/me/h100 datasheet.pdf", "source"),
        f": tdp_w.source: given '/home/me/h100 datasheet.pdf', {SOURCE}",
    ),
    Fault(
        "name in markup", H100, swap("name: H100 SXM 80GB HBM3", "name: <b>H100</b> 80GB"),
        ": name: given '<b>H100</b> 80GB', allowed: words of ASCII with one space between them, without markup",
    ),
    Fault(
        "name with two spaces", H100, swap("name: H100 SXM", "name: H100  SXM"), ": name: given 'H100  SXM 80GB HBM3'",
    ),
    Fault(
        "name with a Cyrillic letter", H100, swap("name: H100", "name: \u041d100"),
        ": name: given '\u041d100 SXM 80GB HBM3', allowed: words of ASCII",
    ),
    Fault(
        "source on a network of one's own", H100, value("tdp_w", "https://wiki.corp.internal/h100", "source"),
        f": tdp_w.source: given 'https://wiki.corp.internal/h100', {SOURCE}",
    ),
    Fault(
        "source that would run", H100, value("tdp_w", "javascript:alert(1) of NVIDIA", "source"),
        f": tdp_w.source: given 'javascript:alert(1) of NVIDIA', {SOURCE}",
    ),
    Fault(
        "source of two lines", H100, value("tdp_w", '"NVIDIA H100\\ndatasheet"', "source"),
        f": tdp_w.source: given 'NVIDIA H100\\ndatasheet', {SOURCE}",
    ),
    Fault("endless id", H100, swap("id: h100-sxm", f"id: {'x' * 300}"), ": id: given 'xxxx"),
    Fault(
        "copied name", "hardware/gpus/b100.yaml", whole(like(H100).replace(b"id: h100-sxm", b"id: b100")),
        ": name: given 'H100",
    ),
    Fault("upper-case file name", "hardware/gpus/H100-NVL.yaml", whole(like(H100)), f": {NAMES}.yaml"),
    Fault("file name with a space", "hardware/gpus/h100 nvl.yaml", whole(like(H100)), f": {NAMES}.yaml"),
    Fault("other ending", "hardware/gpus/h100-nvl.yml", whole(like(H100)), f": {NAMES}.yaml"),
    Fault("left by an editor", "hardware/gpus/h100-sxm.yaml~", whole(like(H100)), f": {NAMES}.yaml"),
    Fault("hidden file", "hardware/gpus/.h100-nvl.yaml", whole(like(H100)), f": {NAMES}.yaml"),
    Fault(
        "one folder too high", "hardware/h100-nvl.yaml", whole(like(H100)),
        ": given a file of this name, allowed: nothing",
    ),
    Fault("readme", "models/README.md", whole(b"# Models\n"), f": {NAMES}.yaml"),
]  # fmt: skip

TEXT_FAULTS = [
    Fault("byte order mark", H100, put(b"\xef\xbb\xbf"), f":1: given a byte order mark, {SHOWS}"),
    Fault("Windows line ends", H100, lambda raw: raw.replace(b"\n", b"\r\n"), f":1: given a carriage return, {SHOWS}"),
    Fault("no-break space", H100, swap("name: ", "name:\u00a0"), f":3: given a no-break space, {SHOWS}"),
    Fault("zero-width space", LLAMA, swap("name: Llama", "name: Lla\u200bma"), ":1: given the character"),
    Fault("Latin-1", H100, put(after="note: né\n".encode("latin-1")), ": not UTF-8: byte 0xe9"),
    Fault("tab", H100, swap("  value:", "\tvalue:"), ":5: not YAML: "),
    Fault("field twice", H100, put(after=b"vendor: NVIDIA\n"), ": field 'vendor' given twice"),
    Fault("second document", H100, put(after=b"---\nid: other\n"), ": not YAML: expected a single document"),
    Fault("empty file", H100, whole(b""), ": given nothing, allowed: a mapping of fields"),
    Fault("list", H100, whole(b"- id: h100-sxm\n"), ": given a list, [{'id': 'h100-sxm'}], allowed: a mapping"),
    Fault("colon without a space", H100, swap("vendor: NVIDIA", "vendor:NVIDIA"), ": not YAML: "),
    Fault("broken schema", "models/schema.json", put(b"{"), ":1: not JSON: "),
]  # fmt: skip

NODE_FAULTS = [
    Fault("unknown card", HGX, swap("[h100-sxm]", "[h100-smx]"), ": gpu_ids[0]: given 'h100-smx', allowed: "),
    Fault("card in capitals", HGX, swap("[h100-sxm]", "[H100-SXM]"), ": gpu_ids[0]: given 'H100-SXM', allowed: "),
    Fault("another card", HGX, swap("[h100-sxm]", "[h200]"), ": gpu_ids[0]: given 'h200', allowed: h100, as name says"),
    Fault(
        "card of an older link", HGX, swap("[h100-sxm]", "[a100-80-sxm]"),
        ": gpu_ids[0]: given 'a100-80-sxm', allowed: h100",
    ),
    Fault("card twice", HGX, swap("[h100-sxm]", "[h100-sxm, h100-sxm]"), ": gpu_ids: given a list, "),
    Fault("no card", HGX, swap("[h100-sxm]", "[]"), ": gpu_ids: given a list, [], allowed: "),
    Fault(
        "no GPUs", HGX, value("gpus", 0), ": gpus.value: given 0, allowed: an integer of at least 2 and of at most 72",
    ),
    Fault("a thousand GPUs", HGX, value("gpus", 1000), ": gpus.value: given 1000, allowed: an integer of at least 2"),
    Fault(
        "misspelt link", HGX, value("link", "NVlink 4, NVSwitch"),
        ": link.value: given 'NVlink 4, NVSwitch', allowed: ",
    ),
    Fault(
        "link of another generation", HGX, value("link", "NVLink 5, NVSwitch"),
        ": link: given 'NVLink 5, NVSwitch', allowed: a link of h100-sxm, which has NVLink 4",
    ),
    Fault(
        "link that the cards lack", CONSUMER, value("link", "NVLink 3 bridge"),
        ": link: given 'NVLink 3 bridge', allowed: ",
    ),
    Fault(
        "slot newer than the cards", CONSUMER, value("link", "PCIe Gen5 x16"),
        ": link: given 'PCIe Gen5 x16', allowed: at most PCIe Gen4",
    ),
    Fault(
        "link of another vendor", HGX, value("link", '"Infinity Fabric, all to all"'),
        ": link: given 'Infinity Fabric, all to all', allowed: a link of h100-sxm, which is NVIDIA's",
    ),
    Fault(
        "both directions", HGX, value("intra_gbs", 900),
        ": intra_gbs: given 900, allowed: 450, half of the 900 GB/s both",
    ),
    Fault("link in TB/s of a node", HGX, value("intra_gbs", 0.45), ": intra_gbs: given 0.45, allowed: 450"),
    Fault("slot in Gb/s", CONSUMER, value("intra_gbs", 256), ": intra_gbs: given 256, allowed: 32"),
    Fault(
        "measured above the link", "hardware/nodes/hgx-h200.yaml", value("measured_gbs", 900),
        ": measured_gbs: given 900, allowed: 45 to 495",
    ),
    Fault("network in Gb/s", HGX, value("inter_gbs", 400), ": inter_gbs: given 400, allowed: 50, the 8 x 400 Gb/s of"),
    Fault(
        "network not shared out", DGX1, value("inter_gbs", 50),
        ": inter_gbs: given 50, allowed: 6.25, the 4 x 100 Gb/s of",
    ),
    Fault(
        "network in TB/s", "hardware/nodes/mi300x-platform.yaml",
        put(after=b"inter_gbs:\n  value: 0.05\n  source: AMD data sheet\n"),
        ": inter_gbs: given 0.05, allowed: 0.1 to 128 GB/s",
    ),
    Fault(
        "host memory in MB", HGX, value("host_ram_gb", 2097152),
        ": host_ram_gb: given 2097152, allowed: 64 to 10240 GB",
    ),
    Fault("threads for cores", DGX1, value("cpu_cores", 4000), ": cpu_cores: given 4000, allowed: 16 to 512"),
    Fault("host memory in TB", HGX, value("host_ram_gb", 2), ": host_ram_gb: given 2, allowed: 64 to 10240 GB"),
    Fault(
        "no peers over NVLink", HGX, value("p2p", "false"),
        ": p2p: given false, allowed: true, over NVLink 4, NVSwitch",
    ),
    Fault(
        "peers of GeForce cards", CONSUMER, value("p2p", "true"),
        ": p2p: given true, allowed: false, over PCIe between rtx3060",
    ),
    Fault("peers in words", HGX, value("p2p", "yes"), ": p2p.value: given 'yes', allowed: true or false"),
    Fault(
        "copied node", "hardware/nodes/hgx-h100-2.yaml", whole(like(HGX).replace(b"id: hgx-h100", b"id: hgx-h100-2")),
        ": name: given 'HGX H100",
    ),
]  # fmt: skip

MODEL_FAULTS = [
    Fault(
        "misspelt config field", LLAMA, swap("num_key_value_heads:", "num_key_value_head:"),
        ": unknown field 'config.num_key_value_head'; did you mean 'config.num_key_value_heads'?",
    ),
    Fault(
        "field of another family", LLAMA, swap("  rope_theta:", "  sliding_window: 4096\n  rope_theta:"),
        ": unknown field 'config.sliding_window'",
    ),
    Fault(
        "misspelt bias", LLAMA, swap("attention_bias:", "atention_bias:"),
        ": unknown field 'config.atention_bias'; did you mean",
    ),
    Fault("missing size", LLAMA, swap("  vocab_size: 128256\n", ""), ": config.vocab_size: nothing given"),
    Fault(
        "heads that do not divide", LLAMA, config("num_key_value_heads", 7),
        ": config.num_key_value_heads: given 7, allowed: a divisor of num_attention_heads = 32",
    ),
    Fault("head of another size", OSS, config("head_dim", 128), ": published_parameters: given "),
    Fault(
        "no vocabulary", LLAMA, config("vocab_size", 0),
        ": config.vocab_size: given 0, allowed: an integer of at least 128",
    ),
    Fault(
        "no layers", LLAMA, config("num_hidden_layers", 0), ": config.num_hidden_layers: given 0, allowed: a positive",
    ),
    Fault(
        "layers missing one", LLAMA, config("num_hidden_layers", 31),
        ": published_parameters: given 8030261248, allowed: 7",
    ),
    Fault("layers of a model without a count", STAR, config("num_hidden_layers", 320), ": config: given "),
    Fault(
        "more active experts than experts", MOE, config("num_experts_per_tok", 129),
        ": config.num_experts_per_tok: given 129, allowed: at most num_experts = 128",
    ),
    Fault("experts' width of the MLP", MOE, config("moe_intermediate_size", 6144), ": published_parameters: given "),
    Fault("size in words", LLAMA, config("hidden_size", "4k"), ": config.hidden_size: given '4k', allowed: "),
    Fault(
        "size as a decimal", LLAMA, config("num_hidden_layers", 32.5),
        ": config.num_hidden_layers: given 32.5, allowed: ",
    ),
    Fault(
        "tied in words", LLAMA, config("tie_word_embeddings", '"false"'),
        ": config.tie_word_embeddings: given 'false', allowed",
    ),
    Fault("unknown family", LLAMA, config("model_type", "lama"), ": config.model_type: given 'lama', allowed: "),
    Fault(
        "another family", LLAMA, config("model_type", "olmo2"),
        ": config.architectures: given a list, ['LlamaForCausalLM'], allowed: a class of the family olmo2",
    ),
    Fault(
        "short dtype", LLAMA, config("torch_dtype", "bf16"), ": config.torch_dtype: given 'bf16', allowed: bfloat16, ",
    ),
    Fault(
        "unknown activation", LLAMA, config("hidden_act", "swiglu"),
        ": config.hidden_act: given 'swiglu', allowed: silu, ",
    ),
    Fault(
        "epsilon in words", LLAMA, config("rms_norm_eps", "1e-5x"), ": config.rms_norm_eps: given '1e-5x', allowed: ",
    ),
    Fault(
        "epsilon of ten", LLAMA, config("rms_norm_eps", 10),
        ": config.rms_norm_eps: given 10, allowed: a number above 0",
    ),
    Fault(
        "misspelt scaling", "models/llama-3.1-8b.yaml", swap("rope_type:", "rope_typ:"),
        ": unknown field 'config.rope_scaling.rope_typ'; did you mean",
    ),
    Fault(
        "unknown scaling", "models/llama-3.1-8b.yaml", swap("rope_type: llama3", "rope_type: llama4"),
        ": config.rope_scaling.rope_type: given 'llama4', allowed: ",
    ),
    Fault(
        "scaling without its factor", OSS, swap("factor: 32.0, ", ""),
        ": missing field 'config.rope_scaling.factor', which rope_type yarn needs",
    ),
    Fault(
        "scaling from beyond the end", OSS,
        swap("original_max_position_embeddings: 4096", "original_max_position_embeddings: 4096000"),
        ": config.rope_scaling.original_max_position_embeddings: given 4096000, allowed: at most",
    ),
    Fault(
        "two number formats", LLAMA, swap("  torch_dtype: bfloat16", "  torch_dtype: bfloat16\n  dtype: float32"),
        ": config.dtype: given 'float32', allowed: bfloat16",
    ),
    Fault(
        "misspelt class", LLAMA, swap("LlamaForCausalLM", "LlamaForCasualLM"),
        ": config.architectures: given a list, ['LlamaForCasualLM'], allowed: a class whose name ends in",
    ),
    Fault("size of another in the name", LLAMA, config("name", "Llama 3 70B"), ": config: given 8,030,261,248"),
    Fault(
        "alias of another size", LLAMA,
        swap("meta-llama/Meta-Llama-3-8B-Instruct", "meta-llama/Meta-Llama-3-70B-Instruct"),
        ": config: given 8,030,261,248 parameters, allowed: 45,500,000,000 to 119,000,000,000, as aliases[",
    ),
    Fault(
        "twice the experts of a token", MOE, config("num_experts_per_tok", 16),
        ": config: given 5,",
    ),
    Fault(
        "one expert of a token", MOE, config("num_experts_per_tok", 1),
        ": config: given 1,767,585,792 active parameters, allowed: 2,250,000,000 to 4,050,000,000, as name says A3B",
    ),
    Fault("groups that do not divide", DEEPSEEK, config("n_group", 7), ": config.n_group: given 7, allowed: a divisor"),
    Fault("more groups than there are", DEEPSEEK, config("topk_group", 9), ": config.topk_group: given 9, allowed: at"),
    Fault("no layer of experts", DEEPSEEK, config("moe_layer_freq", 0), ": config.moe_layer_freq: given 0, allowed: "),
    Fault("misspelt scores", DEEPSEEK, config("scoring_func", "sigmod"), ": config.scoring_func: given 'sigmod'"),
    Fault("misspelt choice", DEEPSEEK, config("topk_method", "noauxtc"), ": config.topk_method: given 'noauxtc'"),
    Fault("factor in words", DEEPSEEK, config("routed_scaling_factor", "two"), ": config.routed_scaling_factor: given"),
    Fault("window in words", SEEING, config("use_sliding_window", "off"), ": config.use_sliding_window: given 'off'"),
    Fault(
        "misspelt field of a tower", SEEING, swap("spatial_merge_size", "spatial_merg_size"),
        ": unknown field 'config.vision_config.spatial_merg_size'; did you mean",
    ),
    Fault(
        "misspelt layer", OSS, swap("sliding_attention", "sliding_atention"),
        ": config.layer_types[0]: given 'sliding_atention'",
    ),
    Fault(
        "published off by a digit", LLAMA, config("published_parameters", 8030261249),
        ": published_parameters: given 8030261249, allowed: 8030261248",
    ),
    Fault(
        "published in billions", LLAMA, config("published_parameters", 8.03),
        ": published_parameters: given 8.03, allowed: ",
    ),
    Fault(
        "not published", LLAMA, swap("published_parameters: 8030261248\n", ""),
        ": missing field 'published_parameters'",
    ),
    Fault(
        "hf without an owner", LLAMA, config("hf", "Meta-Llama-3-8B"),
        ": hf: given 'Meta-Llama-3-8B', allowed: text such as",
    ),
    Fault(
        "hf as an address", LLAMA, config("hf", "https://huggingface.co/meta-llama/Meta-Llama-3-8B"),
        ": hf: given 'https://",
    ),
    Fault(
        "hf as a name", LLAMA, config("name", "meta-llama/Meta-Llama-3-8B"),
        ": name: given 'meta-llama/Meta-Llama-3-8B', allowed: the name that readers write",
    ),
    Fault(
        "hf of another in other case", LLAMA, config("hf", "META-LLAMA/llama-2-7B-HF"),
        ": hf: given 'META-LLAMA/llama-2-7B-HF', already a name of models/llama-2-7b.yaml",
    ),
    Fault(
        "alias of its own name", LLAMA, swap("- meta-llama/Meta-Llama-3-8B-Instruct", "- meta-llama/meta-llama-3-8b"),
        ": aliases[0]: given 'meta-llama/meta-llama-3-8b', allowed: a name that the model does not have",
    ),
    Fault("alias twice", LLAMA, swap("aliases:\n", "aliases:\n  - a/b\n  - a/b\n"), ": aliases: given a list, "),
    Fault(
        "source of another model", LLAMA,
        config("source", "https://huggingface.co/meta-llama/Llama-2-7b-hf/blob/main/config.json"), ": source: given ",
    ),
    Fault(
        "source in words", LLAMA, config("source", "the config.json"),
        ": source: given 'the config.json', allowed: text such as",
    ),
    Fault(
        "count from nowhere", LLAMA, config("parameters_source", "counted"),
        ": parameters_source: given 'counted', allowed: ",
    ),
    Fault(
        "licence to be written", LLAMA, config("licence", "TODO"),
        ": licence: given 'TODO', allowed: a text without TODO",
    ),
    Fault(
        "copied model", "models/llama-4-8b.yaml", whole(like(LLAMA)),
        ": hf: given 'meta-llama/Meta-Llama-3-8B', already a name of models/llama-3-8b.yaml",
    ),
    Fault(
        "copied model, earlier in order", "models/a.yaml", whole(like(LLAMA)),
        ": hf: given 'meta-llama/Meta-Llama-3-8B', already a name of models/llama-3-8b.yaml",
    ),
    Fault(
        "dense layer beyond the last", MOE, config("mlp_only_layers", "[48]"),
        ": config.mlp_only_layers: given 48, allowed: 0 to 47, of num_hidden_layers = 48",
    ),
    Fault(
        "second class of another family", LLAMA, config("architectures", "[LlamaForCausalLM, MistralForCausalLM]"),
        ": config.architectures: given a list, ",
    ),
    Fault(
        "bias in words", LLAMA, config("attention_bias", "none"),
        ": config.attention_bias: given 'none', allowed: ",
    ),
    Fault(
        "source that is no file", LLAMA, config("source", "https://huggingface.co"),
        ": source: given 'https://huggingface.co', allowed: a file of meta-llama/Meta-Llama-3-8B",
    ),
    Fault(
        "licence in markup", LLAMA, config("licence", '"[MIT](javascript:x)"'),
        ": licence: given '[MIT](javascript:x)', allowed: words of ASCII",
    ),
    Fault("upper-case model", "models/Llama-4-8B.yaml", whole(like(LLAMA)), f": {NAMES}.yaml"),
    Fault("config.json among models", "models/config.json", whole(b"{}"), f": {NAMES}.yaml"),
]  # fmt: skip

RECORD_FAULTS = [
    Fault("figure in GiB", "gib", record("gib", measured_bytes=16), ": measured_bytes: given 16, allowed: "),
    Fault(
        "figure with digits swapped", "gib", record("gib", measured_bytes=17934617549),
        ": measured_bytes: given 17934617549, allowed: a figure that quote prints, in GiB; the nearest is 17394617549",
    ),
    Fault(
        "figure in another unit", "gib", record("gib", measured_bytes=16200000000),
        ": measured_bytes: given 16200000000, allowed: ",
    ),
    Fault("unit unlike the quote", "gib", record("gib", unit="GB"), ": unit: given 'GB', allowed: GiB, in which"),
    Fault("unit of no word", "gib", record("gib", unit="MB"), ": unit: given 'MB', allowed: bytes, GB, GiB, GB or GiB"),
    Fault(
        "figure in GiB of a unit GB", "gb", record("gb", measured_bytes=22870000000),
        ": unit: given 'GB', allowed: GiB, in which",
    ),
    Fault(
        "bytes off by one", "bytes", record("bytes", measured_bytes=22292725768),
        ": measured_bytes: given 22292725768, allowed: ",
    ),
    Fault(
        "quote of nothing", "gib", record("gib", quote="it fits well"),
        ": quote: given 'it fits well', allowed: words that",
    ),
    Fault("published without words", "gib", record("gib", "quote"), ": missing field 'quote'"),
    Fault(
        "published without address", "gib",
        record("gib", url=None),
        ": url: given null, allowed: an address",
    ),
    Fault(
        "address in words", "gib", record("gib", url="torchtune's README"),
        ": url: given \"torchtune's README\", allowed: text",
    ),
    Fault(
        "address with a space", "gib", record("gib", url="https://github.com/a b"),
        ": url: given 'https://github.com/a b', allowed",
    ),
    Fault("source me", "gib", record("gib", source="me"), f": source: given 'me', {SOURCE}"),
    Fault(
        "rate unlike its quote", "gb or gib", record("gb or gib", measured_rate__value=10.0),
        ": measured_rate.value: given 10, allowed: ",
    ),
    Fault(
        "stage unlike its quote", "gb or gib", record("gb or gib", measured_stages={"rollout": 12345.5}),
        ": measured_stages.rollout: given 12345.5, allowed: a figure that its quote prints",
    ),
    Fault(
        "rate of another unit", "gb or gib", record("gb or gib", measured_rate__unit="tokens_per_second"),
        ": measured_rate.unit: given 'tokens_per_second', allowed: step_seconds",
    ),
    Fault(
        "rate of no unit", "gb or gib", record("gb or gib", measured_rate__unit="it/s"),
        ": measured_rate.unit: given 'it/s', allowed: ",
    ),
    Fault("held without a moment", "held", record("held", "moment"), ": missing field 'moment'"),
    Fault(
        "held at no moment", "held", record("held", moment="critic: shards on GPU"),
        ": moment: given 'critic: shards on GPU', allowed: ",
    ),
    Fault(
        "moment of a peak", "gib", record("gib", moment="critic: shards on the GPU"),
        ": moment: given 'critic: shards on the GPU', allowed: none, as metric is unknown",
    ),
    Fault(
        "misspelt metric", "gib", record("gib", metric="alocated"), ": metric: given 'alocated', allowed: allocated, ",
    ),
    Fault(
        "figure of a verdict", "gib", record("gib", metric="verdict"),
        ": measured_bytes: given 17394617549 with metric verdict",
    ),
    Fault(
        "no verdict", "edge", record("edge", verdict=None),
        ": verdict: given null with metric verdict",
    ),
    Fault(
        "peak of a job that died", "gib", record("gib", verdict="oom"),
        ": verdict: given 'oom', allowed: fits or null, as measured_bytes is",
    ),
    Fault("id that leads upwards", "traced", record("traced", id="traced/../x"), ": id: given 'traced/../x'"),
    Fault("verdict in capitals", "died", record("died", verdict="OOM"), ": verdict: given 'OOM', allowed: fits, oom, "),
    Fault(
        "died and fits", "died", record("died", verdict="fits"),
        ": verdict: given 'fits', allowed: oom, as observed.oom says",
    ),
    Fault(
        "failed without a reason", "edge", record("edge", verdict="failed"),
        ": verdict: given 'failed', allowed: failed with a failure",
    ),
    Fault(
        "larger than the card", "measured",
        record("measured", "observed", measured_bytes=90 * 2**30),
        ": measured_bytes: given 96636764160, allowed: at most 85899345920, the memory of h100-sxm",
    ),
    Fault(
        "unlike what was observed", "measured", record("measured", measured_bytes=5 * 2**30),
        ": observed.allocated_bytes: given ",
    ),
    Fault(
        "allocated and reserved swapped", "measured", record("measured", observed__reserved_bytes=2**30),
        ": observed.reserved_bytes: given 1073741824, allowed: at least allocated_bytes",
    ),
    Fault(
        "parts of another sum", "traced", record("traced", observed__components__weights=1),
        ": observed.components: given ",
    ),
    Fault(
        "phases of another peak", "traced", record("traced", observed__phases__backward__allocated_bytes=2**40),
        ": measured_bytes: given ",
    ),
    Fault(
        "card unlike the quote", "gib", record("gib", scenario__gpu="rtx3090"),
        ": scenario.gpu: given 'rtx3090', allowed: 4090, which quote says",
    ),
    Fault(
        "method unlike the quote", "gib", record("gib", scenario__method="full"),
        ": scenario.method: given 'full', allowed: lora or qlora",
    ),
    Fault(
        "rate in thousands", "gib", record("gib", measured_rate__value=3083000),
        ": measured_rate.value: given 3083000, allowed: ",
    ),
    Fault(
        "reserved below allocated in a phase", "measured",
        record("measured", observed__phases__backward__reserved_bytes=1),
        ": observed.phases.backward.reserved_bytes: given 1, allowed: ",
    ),
    Fault(
        "peak of no phase", "measured", record("measured", observed__phases__backward__allocated_bytes=1),
        ": observed.allocated_bytes: given 9681076736, allowed: 9057715200",
    ),
    Fault(
        "reserved beyond the card", "measured",
        record("measured", observed__reserved_bytes=2**40, observed__phases__step__reserved_bytes=2**40),
        ": observed.reserved_bytes: given 1099511627776, allowed: at most machine.total_bytes",
    ),
    Fault(
        "in use but for what was free", "measured", record("measured", observed__device_bytes=11835080705),
        ": observed.device_bytes: given 11835080705, allowed: 11835080704",
    ),
    Fault(
        "freed more than there was", "measured", record("measured", observed__free_before_bytes=2**30),
        ": observed.free_after_bytes: given 73182412800, allowed: ",
    ),
    Fault(
        "parameters of another model", "measured", record("measured", observed__parameters=494032769),
        ": observed.parameters: given 494032769, allowed: 494032768",
    ),
    Fault(
        "adapters that the id does not say", "measured", record("measured", id=f"{RECORDS['measured']}/method=lora"),
        ": scenario.method: given 'full', allowed: lora, as id says",
    ),
    Fault(
        "length unlike the id", "traced", record("traced", scenario__seq_len=512),
        ": scenario.seq_len: given 512, allowed: 2048, as id says",
    ),
    Fault(
        "micro batch unlike the id", "traced", record("traced", scenario__micro_batch=4),
        ": scenario.micro_batch: given 4, allowed: 1, as id says",
    ),
    Fault(
        "task unlike the id", "measured", record("measured", scenario__task="dpo"),
        ": scenario.task: given 'dpo', allowed: sft, as id says",
    ),
    Fault(
        "died without a message", "measured", record("measured", verdict="oom", metric="verdict", measured_bytes=None),
        ": missing field 'observed.oom'",
    ),
    Fault(
        "died of something else", "died", record("died", observed__oom__message="it broke"),
        ": observed.oom.message: given 'it broke', allowed: ",
    ),
    Fault(
        "another release of PyTorch", "measured", record("measured", versions__torch="2.4.0"),
        ": versions.torch: given '2.4.0', allowed: 2.11.0",
    ),
    Fault(
        "another name of the card", "measured", record("measured", machine__name="NVIDIA H200"),
        ": machine.name: given 'NVIDIA H200', allowed: ",
    ),
    Fault("trace with a verdict", "traced", record("traced", verdict="fits"), ": verdict: given 'fits', allowed: null"),
    Fault(
        "published as measured", "gib", record("gib", **{"class": "measured"}), ": url: given 'https://github.com/",
    ),
    Fault(
        "rate in GFLOPS of a product", "matmul", lambda raw: raw.replace(b'"tflops": 779.49', b'"tflops": 779490'),
        ": rates[3].tflops: given 779490, allowed: 779.",
    ),
    Fault(
        "product quicker than the card", "matmul",
        lambda raw: raw.replace(b'"seconds": 8.816e-05, "tflops": 779.49', b'"seconds": 8.816e-06, "tflops": 7794.9'),
        ": rates[3].tflops: given 7794.9, allowed: at most 989",
    ),
    Fault(
        "first range upside down", "blind", record("blind", blind__first__low_bytes=2**50),
        ": blind.first.low_bytes: given 1125899906842624, allowed: at most",
    ),
    Fault(
        "first compared tomorrow", "blind", record("blind", blind__first__date="2999-01-01"),
        ": blind.first.date: given '2999-01-01', allowed: ",
    ),
    Fault("no machine", "measured", record("measured", "machine"), ": missing field 'machine'"),
    Fault(
        "unknown machine", "measured", record("measured", machine__gpu="h100"),
        ": machine.gpu: given 'h100', allowed: ",
    ),
    Fault(
        "machine of another card", "measured", record("measured", machine__gpu="h200"), ": machine.total_bytes: given ",
    ),
    Fault(
        "stand-in too small", "matmul", 
        record("matmul", "observed", machine__gpu="h100-sxm", machine__total_bytes=84942979072),
        ": machine.gpu: given 'h100-sxm', allowed: a card with the memory of h200",
    ),
    Fault(
        "day that is not", "measured", record("measured", date="2026-02-30"),
        ": date: given '2026-02-30', allowed: a day of the",
    ),
    Fault(
        "day that lies ahead", "measured", record("measured", date="2999-01-01"),
        ": date: given '2999-01-01', allowed: 2016-09-01 to",
    ),
    Fault(
        "day before PyTorch", "measured", record("measured", date="0202-11-22"),
        ": date: given '0202-11-22', allowed: 2016-09-01 to",
    ),
    Fault(
        "day of another year", "measured", record("measured", date="2025-11-22"),
        ": date: given '2025-11-22', allowed: within 31 days of 2026-11-22",
    ),
    Fault(
        "day the other way round", "measured", record("measured", date="22-11-2026"),
        ": date: given '22-11-2026', allowed: text such as",
    ),
    Fault(
        "edge the wrong way round", "edge", record("edge", edge__fails_at=1),
        ": edge.fails_at: given 1, allowed: above edge.found",
    ),
    Fault(
        "edge unlike its scenario", "edge", record("edge", scenario__micro_batch=1),
        ": scenario.micro_batch: given 1, allowed: ",
    ),
    Fault(
        "rate of no kind", "matmul", lambda raw: raw.replace(b'"op": "matmul"', b'"op": "matmull"', 1),
        ": rates[0].op: given 'matmull', allowed: ",
    ),
    Fault(
        "rate without its size", "matmul", lambda raw: raw.replace(b'"tokens": ', b'"token": ', 1),
        ": missing field 'rates[0].tokens'",
    ),
    Fault(
        "unknown model", "gib", record("gib", scenario__model="lama-3.1-8b"),
        ": scenario.model: given 'lama-3.1-8b', allowed: ",
    ),
    Fault(
        "unknown card of a record", "gib", record("gib", scenario__gpu="rtx409"),
        ": scenario.gpu: given 'rtx409', allowed: ",
    ),
    Fault(
        "misspelt field of a scenario", "gib", record("gib", scenario__micro_bacth=1),
        ": scenario: unknown field 'micro_bacth', allowed: ",
    ),
    Fault(
        "misspelt word of a scenario", "gib", record("gib", scenario__optimizer="adam"),
        ": scenario: optimizer: given 'adam', allowed: ",
    ),
    Fault(
        "scenario that cannot be", "gib", record("gib", scenario__gpus=3, scenario__tensor_parallel=2), ": scenario: ",
    ),
    Fault(
        "scenario in words", "gib", record("gib", scenario="LoRA on a 4090"),
        ": scenario: given 'LoRA on a 4090', allowed: a mapping",
    ),
    Fault("scenario without a task", "gib", record("gib", "scenario__task"), ": missing field 'scenario.task'"),
    Fault(
        "confidence of 90 %", "gib", record("gib", confidence=0.9),
        ": confidence: given 0.9, allowed: high, medium, low",
    ),
    Fault(
        "note to be written in a record", "gib", record("gib", note="TODO which version?"),
        ": note: given 'TODO which version?'",
    ),
    Fault("unknown field of a record", "gib", record("gib", measured=1), ": unknown field 'measured'"),
    Fault(
        "copied id of a record", "gb", record("gb", id=RECORDS["gib"]),
        f": id: given '{RECORDS['gib']}', already the id of measurements/published.jsonl:1",
    ),
    Fault(
        "copied record", PUBLISHED,
        lambda raw: raw + raw.splitlines(keepends=True)[0].replace(b'lora-4090"', b'lora-4091"'),
        ":5: id: given 'published/tune24-l8-lora-4091', allowed: a record of its own",
    ),
    Fault(
        "copied record in an earlier file", "measurements/a.jsonl",
        whole(line("gib")),
        f":1: id: given '{RECORDS['gib']}', already the id of measurements/published.jsonl:1",
    ),
    Fault(
        "address of another repository", "gib", record("gib", url="https://github.com/pytorch/torchtitan"),
        ": url: given 'https://github.com/pytorch/torchtitan', allowed: an address of pytorch/torchtune",
    ),
    Fault(
        "id with a space", "gib", record("gib", id="published/my record"), ": id: given 'published/my record', allowed",
    ),
    Fault("endless id of a record", "gib", record("gib", id=f"published/{'x' * 300}"), ": id: given 'published/xxx"),
    Fault("no rates", "matmul", record("matmul", rates=[]), ": rates: given a list, [], allowed: a list that is not"),
    Fault(
        "version in words", "measured", record("measured", versions__torch="nightly"),
        ": versions.torch: given 'nightly'",
    ),
    Fault("no JSON", PUBLISHED, put(after=b"not json\n"), ":5: not JSON: "),
    Fault("two records on a line", PUBLISHED, lambda raw: raw.replace(b"}\n{", b"} {", 1), ":1: not JSON: Extra data"),
    Fault("record cut off", PUBLISHED, lambda raw: raw[:-40], ":4: not JSON: "),
    Fault("comma at the end", PUBLISHED, lambda raw: raw.replace(b"}\n", b"},\n", 1), ":1: not JSON: "),
    Fault(
        "NaN", "gb or gib", lambda raw: raw.replace(b'"value": 1.0', b'"value": NaN', 1),
        ": measured_rate.value: given a number that is not finite",
    ),
    Fault(
        "field twice in a record", PUBLISHED, lambda raw: raw.replace(b'{"id"', b'{"class": "traced", "id"', 1),
        ":1: field 'class' given twice",
    ),
    Fault(
        "half a character", PUBLISHED, lambda raw: raw.replace(b'"note": "', b'"note": "\\ud83d', 1),
        ":1: given the character",
    ),
    Fault("records as YAML", "measurements/mine.yaml", whole(b"id: a\n"), f": {NAMES}.jsonl"),
    Fault("records in a folder", "measurements/2026/mine.jsonl", whole(b"\n"), f"measurements/2026: {NAMES}.jsonl"),
]  # fmt: skip

MESSAGE_FAULTS = [
    Fault("figure unlike the message", "message", record("message", free_bytes=1), ": free_bytes: given 1, allowed: "),
    Fault("total in MiB", "message", record("message", total_bytes=24207), ": total_bytes: given 24207, allowed: "),
    Fault(
        "another card of a message", "message", record("message", gpu="a100-80-sxm"),
        ": gpu: given 'a100-80-sxm', allowed: a card of 23.6",
    ),
    Fault("unknown card of a message", "message", record("message", gpu="4090"), ": gpu: given '4090', allowed: "),
    Fault(
        "no such message", "message", record("message", quote="CUDA out of memory."),
        ": quote: given 'CUDA out of memory.', allowed: ",
    ),
    Fault(
        "processes unlike the message", "message", record("message", processes=2),
        ": processes: given 2, allowed: 1, which",
    ),
    Fault(
        "release of another wording", "older message", record("older message", torch="2.3.0"),
        ": torch: given '2.3.0', allowed: a release before 2.1",
    ),
    Fault(
        "release in words", "older message", record("older message", torch="latest"),
        ": torch: given 'latest', allowed: a version",
    ),
    Fault(
        "id without its folder", "message", record("message", id="DB-GPT-Hub-248"),
        ": id: given 'DB-GPT-Hub-248', allowed: ",
    ),
    Fault(
        "message twice", "measurements/exhausted/a.jsonl",
        whole(line("message").replace(b'Hub-248"', b'Hub-249"')),
        ":1: id: given 'exhausted/DB-GPT-Hub-249', allowed: a record of its own",
    ),
    Fault(
        "sharding in words", "message", record("message", sharding="ZeRO-3"),
        ": sharding: given 'ZeRO-3', allowed: none, ddp",
    ),
    Fault(
        "zero GPUs of a message", "message", record("message", gpus=0),
        ": gpus: given 0, allowed: an integer of at least 1",
    ),
]  # fmt: skip

BESIDE_FAULTS = [
    Fault("misspelt reference", PEERS, swap("reference: 21.9", "referenc: 21.9"), ": unknown field 'jobs.S1.referenc'"),
    Fault(
        "answer in words", PEERS, swap("S1: 36.66", "S1: many"),
        ": peers.EleutherAI/cookbook.S1: given 'many', allowed: a number",
    ),
    Fault(
        "answer to no job", PEERS, swap("S1: 36.66", "S9: 36.66"),
        ": unknown field 'peers.EleutherAI/cookbook.S9', allowed: S1, S2, S3",
    ),
    Fault(
        "unknown model of a job", PEERS, swap("model: llama-3-8b", "model: lama-3-8b"),
        ": jobs.S1: scenario: model: given 'lama-3-8b', allowed: ",
    ),
    Fault(
        "unknown model of a cache", PEERS, swap("{model: qwen2.5-7b", "{model: qwen2.5-7bb"),
        ": jobs.S6.cache: model: given 'qwen2.5-7bb', allowed: ",
    ),
    Fault(
        "reason of nobody", PEERS, swap("\n  cli99/llm-analysis: Every", "\n  cli9/llm-analysis: Every"),
        ": missing field 'reasons.cli99/llm-analysis': why it answers otherwise",
    ),
    Fault("torn file of answers", PEERS, put(after=b"]]}"), ": not YAML: "),
    Fault("no answers", PEERS, whole(b""), ": given nothing, allowed: a mapping of fields"),
    Fault("job without an address", UNSAID, swap("url: https://github.com", "url: github"), ": jobs[0].url: given '"),
    Fault("job in words", UNSAID, swap("figure: true", "figure: maybe"), ".figure: given 'maybe', allowed: "),
    Fault("job twice", UNSAID, swap("id: lomo-t1-adamw-noac", "id: lomo-t1-adamw-ac"), ".id: given 'lomo-t1-adamw-ac'"),
    Fault(
        "unknown card of a stored peak", GOLDEN, swap('"gpu": "h100-sxm"', '"gpu": "h100-smx"'),
        ":1: gpu: given 'h100-smx', allowed: an id that",
    ),
    Fault(
        "stored peak in MB", GOLDEN, swap('"max_allocated_bytes": 60720852992', '"max_allocated_bytes": 60720'),
        ":1: max_allocated_bytes: given 60720, allowed: allocated_bytes = 24808996864 to ",
    ),
    Fault(
        "misspelt argument", GOLDEN, swap('"hidden-size"', '"hiden-size"'), ":1: unknown field 'arguments.hiden-size'",
    ),
    Fault("no stored peaks", GOLDEN, whole(b""), ": given nothing, allowed: a record a line"),
    Fault(
        "misspelt field of a suite", SUITE, swap("checkpointing:", "chekpointing:"),
        ": unknown field 'cases[1].chekpointing'; did you mean 'checkpointing'?",
    ),
    Fault(
        "unknown model of a suite", SUITE, swap("model: llama-3.2-1b", "model: lama-3.2-1b"),
        ": cases[1]: model: given 'lama-3.2-1b', allowed: ",
    ),
    Fault("suite without cases", SUITE, swap("cases:", "case:"), ": unknown field 'case'; did you mean 'cases'?"),
]  # fmt: skip

FAULTS = [*GPU_FAULTS, *TEXT_FAULTS, *NODE_FAULTS, *MODEL_FAULTS, *RECORD_FAULTS, *MESSAGE_FAULTS, *BESIDE_FAULTS]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted.copy(tmp_path_factory.mktemp("planted"))


def refusal(root: Path) -> str:
    load.cache_clear()
    try:
        check(root)
    except CatalogError as error:
        return str(error)
    return ""


def test_without_a_fault_the_copy_passes(root: Path) -> None:
    """So that each refusal below is that of its fault."""
    assert refusal(root) == ""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_stopped_in_one_line(root: Path, fault: Fault) -> None:
    where = planted.place(root, fault.file) if fault.file in RECORDS else fault.file
    path = root / where.partition(":")[0]
    before = path.read_bytes() if path.exists() else None
    after = fault.change(before or b"")
    assert after != before
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(after)
    try:
        said = refusal(root)
    finally:
        path.unlink()
        if before is not None:
            path.write_bytes(before)
        elif path.parent.name == "2026":
            path.parent.rmdir()
    assert said.isprintable()
    assert fault.says in said
    assert said.startswith(where) or said.startswith(fault.says)


def test_each_fault_has_a_name_of_its_own_and_there_are_many() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 60


def test_the_command_says_it_on_one_line(root: Path, run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 2, nothing on standard output."""
    path = root / H100
    before = path.read_bytes()
    monkeypatch.setattr("calc.base.project.ROOT", root)
    load.cache_clear()
    path.write_bytes(value("bandwidth_gbs", 3.35)(before))
    try:
        assert run("check").refused().startswith(f"{H100}: bandwidth_gbs: given 3.35, allowed: ")
    finally:
        path.write_bytes(before)
        load.cache_clear()
