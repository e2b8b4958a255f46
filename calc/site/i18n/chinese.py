"""The words around a table and in the calculator's form, in Chinese: headings, the legend, the menu, the fields.

Cells, assumptions and notes stay as they are: a translation shows the tables of its original.
"""

from __future__ import annotations

import re

from calc.site.tables import charts

COMPONENTS = {
    "weights": "权重",
    "master_weights": "fp32 主权重",
    "optimizer_states": "优化器状态",
    "gradients": "梯度",
    "adapter": "适配器",
    "checkpoints": "检查点",
    "activations": "激活值",
    "logits": "logits",
    "kv_cache": "KV 缓存",
    "cuda_graphs": "CUDA 图",
    "communication": "通信",
    "temporary": "临时",
    "workspace": "cuBLAS 工作区",
    "nccl": "NCCL",
    "fragmentation": "碎片",
    "context": "CUDA 上下文",
    "checkpoint": "主机上的检查点",
}
WORDS = {
    **{charts.title(c): name for c, name in COMPONENTS.items()},
    **{charts.name(c): name for c, name in COMPONENTS.items()},
    # headings of tables
    "Phase": "阶段",
    "Needs": "需要",
    "Usable": "可用",
    "Against the limit": "与上限相比",
    "Peak at": "峰值时刻",
    "Allocated": "分配器持有",
    "Model": "模型",
    "Job": "任务",
    "Verdict": "结论",
    "Verdict of these GPUs": "这组显卡的结论",
    "Likely to fit": "放得下的概率",
    "As reported": "报告所说",
    "Peak in": "峰值所在阶段",
    "Component": "组成",
    "Role": "角色",
    "Memory": "显存",
    "Formula": "公式",
    "Values": "代入的数值",
    "Derived in": "推导",
    "Counted by the allocator": "计入分配器",
    "Parameters": "参数量",
    "What it does": "做什么",
    "What changes": "改动",
    "Against the first": "与第一行相比",
    "While others work": "别人工作时",
    "Held by": "由谁持有",
    "Weights on each GPU": "每张卡上的权重",
    "Optimizer states there": "那里的优化器状态",
    "Tensor parallel": "张量并行",
    "Utilization": "显存占比",
    "KV cache of each GPU": "每张卡的 KV 缓存",
    "It holds": "可容纳",
    "Full length": "最大长度",
    "Of full length at once": "可同时容纳的满长序列",
    "To generate, each engine": "每个引擎要生成",
    "Starts": "能否启动",
    "Loading": "加载",
    "Optimizer built": "优化器建成",
    "Before the first step": "第一次更新前",
    "After the first step": "第一次更新后",
    "Weights flattened": "权重展平",
    "Save": "保存",
    "Moment of loading": "加载的时刻",
    "On the GPU": "显卡上",
    "GPUs": "卡数",
    "GPUs of": "哪组显卡",
    "Tokens a sequence": "每条序列的 token 数",
    "Tokens a sequence on average": "每条序列平均 token 数",
    "Tokens a response": "每个回答的 token 数",
    "Mean length": "平均长度",
    "One step": "一步",
    "Without collectives": "不计集合通信",
    "Collectives": "集合通信",
    "Quicker than the first": "比第一行快",
    "Term": "项",
    "Seconds": "时间",
    "With": "代入",
    # beside and below them
    "what a process can use": "进程可用",
    "fits": "fits：放得下",
    "tight": "tight：勉强",
    "out of memory": "out of memory：显存不足",
    "Darker: fuller card, or further over": "颜色越深：卡用得越满，或超出越多",
    "newest cards first": "新卡在前",
    "The points as a table": "各点的表格",
    "How far off:": "误差：",
    "Download": "下载",
    "Cite": "引用",
    "Numbers": "数值",
    "Permalink to this version": "此版本的永久链接",
    "Supervised fine-tuning, full, on 8 GPUs: the verdict, and what the fullest GPU needs": (
        "监督微调，全量，八卡：结论，以及最满的那张卡需要多少"
    ),
    "Supervised fine-tuning, LoRA, on one GPU: the verdict, and what the fullest GPU needs": (
        "监督微调，LoRA，单卡：结论，以及最满的那张卡需要多少"
    ),
    # the calculator's form, and the other tasks
    "Supervised fine-tuning": "监督微调",
    "Supervised fine-tuning, other methods": "监督微调，其他方法",
    "Reward model": "奖励模型",
    "Task": "任务",
    "Vendor": "厂商",
    "Card's memory": "显存容量",
    "Family": "模型系列",
    "any": "不限",
    "models": "个模型",
    "cards": "种显卡",
    "GPU": "显卡",
    "How many": "几张",
    "the smallest that runs it": "能跑的最小的卡",
    "Method, framework, lengths": "方法、框架、长度",
    "Precision, sharding, offload, batches": "精度、分片、卸载、批次",
    "Rollout, placement, roles": "生成、放置、角色",
    "Nodes and host memory": "节点与主机内存",
    "the calculator chooses": "由计算器选择",
    "the framework's default": "框架的默认值",
    "LoRA rank": "LoRA 秩",
    "Framework and version": "框架与版本",
    "Mean real length, tokens": "平均实际长度（token）",
    "Packing": "打包 (packing)",
    "Settings left open": "未填的设置",
    "search for the best": "搜索最优配置",
    "take the framework's defaults": "取框架默认值",
    "A model of your own: its config.json": "自己的模型：config.json",
    "Micro batch": "微批次",
    "Precision": "精度",
    "Optimizer": "优化器",
    "Sharding": "分片",
    "Optimizer in host memory": "优化器放主机内存",
    "Weights in host memory": "权重放主机内存",
    "Activation checkpointing": "激活重计算",
    "Attention": "注意力实现",
    "Cross entropy": "交叉熵",
    "Context parallel": "上下文并行",
    "Placement": "放置",
    "all on the same GPUs": "全部共用显卡",
    "GPUs apart": "各用各的显卡",
    "What generates": "由谁生成",
    "vLLM's share of the card": "vLLM 的显存占比",
    "vLLM's tensor parallel": "vLLM 的张量并行",
    "Responses for a prompt": "每条提示的回答数",
    "vLLM sleeps": "vLLM 休眠",
    "Reference model": "参考模型",
    "Critic model": "价值模型 (critic)",
    "runs": "运行",
    "does not run": "不运行",
    "yes": "是",
    "no": "否",
    "GPUs in a node": "每节点卡数",
    "Host memory, GB a node": "每节点主机内存（GB）",
    "Method": "方法",
    "Framework": "框架",
    "full if it fits, else LoRA, else QLoRA": "能全量就全量，否则 LoRA，再否则 QLoRA",
    "full fine-tuning": "全量微调",
    "plain PyTorch": "纯 PyTorch",
    "Sequences or pairs a step": "每步的序列数或样本对数",
    "Tokens a prompt": "每条提示的 token 数",
    "What do I run?": "该怎么跑？",
    "Copy link": "复制链接",
    "Stop": "停止",
    "The scenario file, to copy or to change": "场景文件，可复制或修改",
    "Copy": "复制",
    "Estimate it": "估算",
    "Without JavaScript the calculator has this one answer; the tables below have the rest.": (
        "没有 JavaScript 时计算器只有这一个答案，其余见下面的表格。"
    ),
}
PHRASES = (
    (re.compile(r"what a process can use: ([\d.]+) GiB"), r"进程可用：\1 GiB"),
    (re.compile(r"(.+): ([\d.]+) usable"), r"\1：可用 \2"),
)
TEXT = re.compile(r"(?<=>)([^<>]+?)(?=\s*<)")
LEFT = re.compile(r'(<tbody>.*?</tbody>|<span class="verdict.*?</span>)', re.S)


def speak(html: str) -> str:
    """The HTML with its words in Chinese; rows of tables and verdicts as they are."""
    parts = LEFT.split(html)
    return "".join(part if i % 2 else TEXT.sub(_said, part) for i, part in enumerate(parts))


def _said(found: re.Match[str]) -> str:
    text = found[1].strip()
    if text in WORDS:
        return WORDS[text]
    for pattern, chinese in PHRASES:
        if pattern.fullmatch(text):
            return pattern.sub(chinese, text)
    return found[1]
