"""The Chinese catalogue: the guide's words outside the prose of its pages, by the English ones.

`calc.site.i18n.speech` reads it. A word that Chinese engineers leave in English stands for itself.
"""

from __future__ import annotations

from collections.abc import Mapping

COMPONENTS = {
    "weights": "权重",
    "rotary tables": "旋转位置表",
    "fp32 master weights": "fp32 主权重",
    "optimizer states": "优化器状态",
    "gradients": "梯度",
    "adapters": "适配器",
    "checkpoints": "检查点",
    "activations": "激活值",
    "logits": "logits",
    "KV cache": "KV 缓存",
    "CUDA graphs": "CUDA 图",
    "communication": "通信",
    "temporary": "临时",
    "cuBLAS workspace": "cuBLAS 工作区",
    "NCCL": "NCCL",
    "fragmentation": "碎片",
    "CUDA context": "CUDA 上下文",
    "checkpoint on the host": "主机上的检查点",
}
# Phases, roles, and the moments within a phase.
MOMENTS = {
    "load": "加载",
    "rollout": "rollout",
    "score": "打分",
    "forward": "前向",
    "backward": "反向",
    "step": "优化器更新",
    "sync": "权重同步",
    "save": "保存",
    "actor": "actor",
    "critic": "critic",
    "reference": "参考模型",
    "reward": "奖励模型",
    "process": "进程",
    "{one}+{other}": "{one}+{other}",
    "stage {n#}": "第 {n} 段",
    "no layers": "没有层",
    "the process": "进程",
    "all-to-all": "all-to-all",
    "all-to-all back": "all-to-all 送回",
    "permute": "按专家重排",
    "unpermute": "还原次序",
    "scatter": "散布",
    "reduce-scatter": "reduce-scatter",
    "LoRA gather": "LoRA 收集",
    "rotary key": "旋转键",
    "repeat": "重复",
    "dropout": "dropout",
    "fc1": "fc1",
    "fc2": "fc2",
    "values": "值",
    "layer": "层",
    "first layer": "第一层",
    "mlp": "MLP",
    "loss": "损失",
    "embedding": "嵌入层",
    "final norm": "最后的归一化",
    "weight": "权重",
    "lm_head": "lm_head",
    "product": "乘积",
    "divide": "除以温度",
    "add": "相加",
    "sort weights": "排序权重",
    "sort": "排序",
    "unsort": "还原次序",
    "bound": "限定下界",
    "clamp gate": "截断 gate",
    "clamp up": "截断 up",
    "scale gate": "缩放 gate",
    "add shared": "加上共享专家",
    "weigh": "加权",
    "down": "down",
    "up": "up",
    "gate": "gate",
    "glu": "glu",
    "activation": "激活函数",
    "sigmoid": "sigmoid",
    "router": "路由",
    "top k": "top k",
    "normalise": "归一化",
    "softmax": "softmax",
    "shared": "共享专家",
    "probabilities": "注意力概率",
    "expand": "扩展",
    "heads": "分头",
    "join": "合并",
    "rotate": "旋转位置",
    "split": "切分",
    "slice": "切片",
    "rows": "取行",
    "shift": "错位",
    "scale": "缩放",
    "unpad": "去掉填充",
    "tanh": "tanh",
    "over cap": "除以上限",
    "times cap": "乘以上限",
    "mask": "掩码",
    "join sink": "并入 sink",
    "drop sink": "去掉 sink",
    "less maximum": "减去最大值",
    "add attention": "加上注意力",
    "add cube": "加三次项",
    "cube": "三次方",
    "part of cube": "三次项系数",
    "half": "减半",
    "square": "平方",
    "contiguous": "连续化",
    "less mean": "减去均值",
    "kv": "kv",
    "k": "k",
    "q": "q",
    "entropy": "熵",
    "log-softmax": "log-softmax",
    "nll": "负对数似然",
    "logsumexp": "logsumexp",
    "generation": "生成",
    "decode": "解码",
    "prompts": "提示",
    "last token": "最后一个 token",
    "gather": "收集分片",
    "recompute": "重计算",
    "to bf16": "转为 bf16",
    "to fp32": "转为 fp32",
    "weight to bf16": "权重转为 bf16",
    "LoRA A": "LoRA A",
    "LoRA B": "LoRA B",
    "LoRA scale": "LoRA 缩放",
    "LoRA add": "LoRA 相加",
    "{name}_proj": "{name}_proj",
    "ready": "就绪",
    "state dict": "state dict",
    "root FSDP unit flattened": "根 FSDP 单元展平",
    "shards on the GPU": "分片已在显卡上",
    "weights on the GPU": "权重已在显卡上",
    "embedding's gradient: copy": "嵌入层梯度：复制",
    "experts before four bits": "专家量化为 4 位之前",
    "last table: cast": "最后一张表：转换类型",
    "table: cast on the GPU": "词嵌入表在显卡上转换类型",
    "adapters decomposed from weights": "由权重分解出适配器",
    "weights arrive": "权重到达",
    "weights to the engine": "权重交给引擎",
    "weights flattened": "权重展平",
    "gradients flattened": "梯度展平",
    "gradients of a sub-group flattened": "子组的梯度展平",
    "a layer's gradients joined": "一层的梯度合并",
    "first layer gathered": "收集第一层",
    "layer gathered": "收集一层",
    "layer, recomputed": "重计算的层",
    "the embedding's gradient": "词嵌入的梯度",
    "output head": "输出头",
    "value head": "标量输出头",
    "each token's own logit": "取出每个 token 自己的 logits",
    "product of gate and up": "MLP 的门控乘积",
    "activation of the MLP": "MLP 的激活函数",
    "experts' outputs back in order": "专家输出还原次序",
    "LoRA scaled": "LoRA 缩放",
    "{name} cast to fp32": "{name} 转为 fp32",
    "{name} cast to bf16": "{name} 转为 bf16",
    "logits gathered from all ranks": "从各卡收集 logits",
    "logits divided by the temperature": "logits 除以温度",
    "logits cut to the response": "logits 只留回答部分",
    "logits without padding": "logits 去掉填充",
    "logits without the last position": "logits 去掉最后一个位置",
    "logits capped": "logits 限幅",
    "reduction of all gradients": "归约全部梯度",
    "reduction of the last gradients": "归约最后的梯度",
    "gradient norm": "梯度范数",
    "overflow check": "溢出检查",
    "optimizer built": "优化器建成",
    "optimizer step": "优化器更新",
    "optimizer step on the host": "主机上的优化器更新",
    "gradients to the host": "梯度移到主机",
    "weights gathered": "权重已收集",
    "optimizer step of a sub-group": "子组的优化器更新",
    "before the first step": "第一次更新前",
    "after the first step": "第一次更新后",
    "loading": "加载",
    "KV cache allocated": "KV 缓存已分配",
    "profile run": "试运行",
    "cross entropy": "交叉熵",
    "fused loss": "融合损失",
    "loss in pieces": "分块损失",
    "logsumexp of rows": "各行的 logsumexp",
}
VERDICTS = {
    "fits": "放得下",
    "tight": "勉强",
    "out of memory": "显存不足",
    "out of memory in {phase}": "显存不足（{phase}）",
    "out of host memory in {phase}": "主机内存不足（{phase}）",
    "out of host memory": "主机内存不足",
    "out of memory: {moment*}": "内存不足：{moment}",
    "nothing fits": "没有放得下的配置",
    "cannot run": "跑不了",
    "not asked": "未计算",
    "in a moment": "稍候",
    "far too small": "差得太远",
    "vLLM does not start": "vLLM 无法启动",
    "vLLM does not start: {reason*}": "vLLM 无法启动：{reason}",
    "SGLang does not start": "SGLang 无法启动",
    "SGLang does not start: {reason*}": "SGLang 无法启动：{reason}",
    "nothing can be run: {reason*}": "没有可以运行的配置：{reason}",
}
# What describes a job: model, task, machine, settings.
JOBS = {
    "supervised fine-tuning": "监督微调",
    "reward model": "奖励模型",
    "pre-training": "预训练",
    "inference": "推理",
    "SFT in full, one GPU": "全量 SFT，单卡",
    "SFT with LoRA or QLoRA, one GPU": "LoRA 或 QLoRA 的 SFT，单卡",
    "SFT with LoRA, eight GPUs": "LoRA 的 SFT，八卡",
    "Reward model with LoRA, one GPU": "LoRA 的奖励模型，单卡",
    "DPO with LoRA, one GPU": "LoRA 的 DPO，单卡",
    "full": "全量",
    "full fine-tuning": "全量微调",
    "verl": "verl",
    "slime": "slime",
    "verl {version!}": "verl {version}",
    "plain PyTorch": "纯 PyTorch",
    "plain PyTorch {version}": "纯 PyTorch {version}",
    "litgpt": "litgpt",
    "torchtune": "torchtune",
    "torchtitan": "torchtitan",
    "ColossalAI": "ColossalAI",
    "Megatron-LM": "Megatron-LM",
    "Functional test of Megatron-LM": "Megatron-LM 的功能测试",
    "Stored peak": "存档峰值",
    "Decoders without experts among Megatron-LM's functional tests, on eight H100": (
        "Megatron-LM 功能测试中不含专家的解码器，八张 H100"
    ),
    "Bytes in use at most on the last rank (mem-max-allocated-bytes), golden values of {commit}.": (
        "最后一个 rank 使用字节数的最大值（mem-max-allocated-bytes），取自 {commit} 的基准值。"
    ),
    "Megatron": "Megatron",
    "computed with Transformer Engine's layers, RoPE fused, gradients added up within the products, 1F1B": (
        "按 Transformer Engine 的层、融合的 RoPE、在矩阵乘积内累加的梯度和 1F1B 计算"
    ),
    "computed with Transformer Engine's layers, RoPE fused, gradients added up within the products, 1F1B interleaved": (
        "按 Transformer Engine 的层、融合的 RoPE、在矩阵乘积内累加的梯度和交错 1F1B 计算"
    ),
    "context parallelism passes keys and values around a ring (cp_comm_type p2p)": (
        "上下文并行把键和值沿环传递（cp_comm_type p2p）"
    ),
    "a pack of max_length tokens holds two halves: expected_len is half of seq_len unless given": (
        "一个 max_length 个 token 的打包序列含两半：不给定时 expected_len 为 seq_len 的一半"
    ),
    "KL forwards, without gradient, run before the policy's: they need no more than the reference's": (
        "KL 的前向不带梯度，在策略的前向之前运行：不比参考模型的前向多用显存"
    ),
    "the language model alone is counted: the first stage has the checkpoint's vision tower, too": (
        "只计入语言模型：第一个流水线阶段上还有检查点的视觉塔"
    ),
    "full recomputation is --recompute-method uniform with one layer at a time": (
        "完全重计算即 --recompute-method uniform，每次一层"
    ),
    "Transformers' Trainer": "Transformers 的 Trainer",
    "LoRA of rank {rank#}": "秩 {rank} 的 LoRA",
    "QLoRA of rank {rank#}": "秩 {rank} 的 QLoRA",
    "{optimizer} in 8 bits": "8 位 {optimizer}",
    "Liger's kernels": "Liger 的 kernel",
    "parameters step in backward": "参数在反向中更新",
    "paged AdamW": "分页 AdamW",
    "torchao's AdamW": "torchao 的 AdamW",
    "AdamW with Kahan summation": "带 Kahan 求和的 AdamW",
    "LOMO": "LOMO",
    "Muon": "Muon",
    "AdamW in GaLore's low rank": "GaLore 低秩的 AdamW",
    "SGD with momentum": "带动量的 SGD",
    "bf16": "bf16",
    "fp16 with a loss scaler": "fp16 加损失缩放",
    "mixed precision": "混合精度",
    "FSDP's mixed precision": "FSDP 的混合精度",
    "fp32 under autocast": "autocast 下的 fp32",
    "FlashAttention": "FlashAttention",
    "PyTorch's attention": "PyTorch 自带的注意力",
    "eager attention": "eager 注意力",
    "mixed": "mixed",
    "fsdp-mixed": "fsdp-mixed",
    "autocast": "autocast",
    "none": "none",
    "not sharded": "不分片",
    "zero{stage}": "zero{stage}",
    "ddp": "ddp",
    "fsdp{version}": "fsdp{version}",
    "one GPU": "单卡",
    "no checkpointing": "不开激活重计算",
    "checkpointing": "激活重计算",
    "full checkpointing": "完整的激活重计算",
    "selective checkpointing": "选择性激活重计算",
    "checkpointing selective": "选择性激活重计算",
    "expandable segments": "可扩展段",
    "pinned memory not rounded above {n#} MiB": "{n} MiB 以上的锁页内存不取整",
    "tensor parallel {n#}": "张量并行 {n}",
    "pipeline parallel {n#}": "流水线并行 {n}",
    "virtual pipeline {n#}": "虚拟流水线 {n}",
    "context parallel {n#}": "上下文并行 {n}",
    "expert parallel {n#}": "专家并行 {n}",
    "tensor parallel": "张量并行",
    "context parallel": "上下文并行",
    "swapped heads": "交换的注意力头",
    "sequence parallel": "序列并行",
    "layers over GPUs {n#}": "层分布在 {n} 张卡上",
    "groups of shards {n#}": "{n} 组分片",
    "gathered weights stay": "收集的权重不释放",
    "micro batch {n#}": "微批次 {n}",
    "micro batch {n#} of up to {tokens} tokens": "微批次 {n}，至多 {tokens} 个 token",
    "in pairs": "成对样本",
    "{n#} tokens": "{n} 个 token",
    "prompts of {prompt} and responses of {response} tokens": "提示 {prompt}、回答 {response} 个 token",
    "no rollout": "没有 rollout",
    "rollout by Transformers": "由 Transformers 生成",
    "rollout by vLLM {version}": "由 vLLM {version} 生成",
    "rollout by vLLM": "由 vLLM 生成",
    "rollout by SGLang {version}": "由 SGLang {version} 生成",
    "Transformers generates": "由 Transformers 生成",
    "one for each of {prompts} prompts": "{prompts} 条提示各一个回答",
    "{n#} for each of {prompts} prompts": "{prompts} 条提示各 {n} 个回答",
    "{n#} for one prompt": "一条提示 {n} 个回答",
    "one for one prompt": "一条提示一个回答",
    "utilization {share}": "显存占比 {share}",
    "sleeps while others work": "别的角色工作时休眠",
    "asleep while others work": "别的角色工作时休眠",
    "never sleeps": "从不休眠",
    "never asleep": "从不休眠",
    "vLLM with tensor parallel {n#}": "vLLM 张量并行 {n}",
    "SGLang with tensor parallel {n#}": "SGLang 张量并行 {n}",
    "{share} of the card for vLLM": "显存的 {share} 给 vLLM",
    "{share} of the card for SGLang": "显存的 {share} 给 SGLang",
    "on all GPUs": "共用全部显卡",
    "GPUs apart": "各用各的显卡",
    "{role} on {n#}": "{role} 用 {n} 张",
    "{role} ({model}) on {n#}": "{role}（{model}）用 {n} 张",
    "{role} with {other}": "{role} 与 {other} 共用",
    "{role} ({model})": "{role}（{model}）",
    "{n#} for {role}": "{role} {n} 张",
    "{what} in host memory": "{what}放在主机内存",
    "nothing in host memory": "不卸载",
    "optimizer": "优化器",
    "Adam's step": "Adam 的更新",
    "{n#} GPUs": "{n} 张卡",
    "{n#} GPU": "{n} 张卡",
    "offload": "卸载",
    "host {size}": "主机 {size}",
}
HEADINGS = {
    "Phase": "阶段",
    "Needs": "需要",
    "Usable": "可用",
    "Against the limit": "与上限相比",
    "Peak at": "显存峰值时刻",
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
    "While others work": "别的角色工作时",
    "Held by": "由谁持有",
    "Weights on each GPU": "每张卡上的权重",
    "Optimizer states there": "每张卡上的优化器状态",
    "Tensor parallel": "张量并行",
    "Utilization": "显存占比",
    "KV cache of each GPU": "每张卡的 KV 缓存",
    "It holds": "可容纳",
    "Full length": "最大长度",
    "Of full length at once": "可同时容纳的满长序列",
    "To generate, each engine": "每个引擎要生成",
    "Starts": "能否启动",
    "Moment of loading": "加载的时刻",
    "On the GPU": "显卡上",
    "GPUs": "卡数",
    "GPUs of": "哪组显卡",
    "Tokens a sequence": "每条序列的 token 数",
    "Tokens a sequence on average": "每条序列平均 token 数",
    "Tokens a response": "每个回答的 token 数",
    "tokens a sequence": "每条序列的 token 数",
    "tokens a sequence on average": "每条序列平均 token 数",
    "tokens a response": "每个回答的 token 数",
    "Tokens a second": "每秒 token 数",
    "Instant": "时刻",
    "No.": "序号",
    "Together, on each": "每张卡合计",
    "On all GPUs": "所有卡合计",
    "Mean length": "平均长度",
    "One step": "一步",
    "Without collectives": "不计集合通信",
    "Collectives": "集合通信",
    "Quicker than the first": "比第一行快",
    "Term": "项",
    "Seconds": "时间",
    "With": "代入",
    "Saves": "节省",
    "Before": "之前",
    "After": "之后",
    "Time": "时间",
    "Needs before": "之前需要",
    "Needs after": "之后需要",
    "Most in one phase": "单个阶段最多节省",
    "In phase": "在阶段",
    "Saves in host memory": "节省的主机内存",
    "Before, against the limit": "之前，与上限相比",
    "After, against the limit": "之后，与上限相比",
    "of which {component}": "其中{component}",
    "Remedy": "办法",
    "Settings": "设置",
    "Speed": "速度",
    "Bound by": "瓶颈",
    "Host memory": "主机内存",
    "Configuration": "配置",
    "Next faster, and what it lacks": "更快一档的配置缺什么",
    "Next faster, which does not fit": "更快一档，放不下",
    "Closest miss": "最接近的一个",
    "Run this": "就跑这个",
    "Theirs": "官方",
    "Ours": "本指南",
    "What ours sets otherwise": "本指南的不同设置",
    "Ours needs": "本指南的配置需要",
    "Theirs sets": "官方的设置",
    "Card": "显卡",
    "Cards": "显卡",
    "Sold with": "标称",
    "As sold": "标称",
    "If that were 10⁹ bytes each": "若按 10⁹ 字节计",
    "If that were 2³⁰ bytes each": "若按 2³⁰ 字节计",
    "A process gets": "进程实际可用",
    "Less than the second": "比前一列少",
    "Error correction": "纠错（ECC）",
    "Usable is": "可用值来自",
    "Bandwidth": "带宽",
    "BF16 dense": "BF16 稠密",
    "FP8 dense": "FP8 稠密",
    "NVLink, both ways": "NVLink，双向",
    "PCIe gen": "PCIe 代数",
    "Power": "功耗",
    "Architecture": "架构",
    "Node": "节点",
    "Link": "互连",
    "Direct (peer to peer)": "卡间直连（P2P）",
    "In the node, per GPU, one way": "节点内，每卡单向",
    "All-reduce, measured": "All-reduce 实测",
    "Between nodes, per GPU, one way": "节点间，每卡单向",
    "Host RAM, as usually sold": "主机内存，常见配置",
    "CPU cores": "CPU 核数",
    "Value": "数值",
    "Source": "来源",
    "Note": "备注",
    "A node of {size} GB": "{size} GB 的节点",
    "{n#} pairs": "{n} 对样本",
    "{n#} sequences": "{n} 条序列",
    "{n#} responses": "{n} 个回答",
    "tokens": "token",
    "sequences": "序列",
    "(tokens)": "(token)",
    "(sequences)": "(序列)",
    "(bytes per token)": "(字节/token)",
}
# What a heading says when a pointer rests on it.
HINTS = {
    "Everything the process takes of the card": "进程在卡上占用的全部",
    "Everything the process takes of the fullest GPU": "进程在占用最多的那张卡上的全部",
    "Everything the processes take of the card": "各进程在卡上占用的全部",
    "Everything the processes take of the card by then": "到那时各进程在卡上占用的全部",
    "What torch.cuda.max_memory_allocated would show": "torch.cuda.max_memory_allocated 会显示的值",
    "What torch.cuda.memory_allocated would show by then": "到那时 torch.cuda.memory_allocated 会显示的值",
    "What the card lets a process use": "这张卡上进程可用的显存",
    "The probability that the peak stays below usable": "峰值不超过可用显存的概率",
    "Its name, and what a process can use of it": "显卡名称，以及进程可用的显存",
    "What a process can use, as PyTorch sees it": "PyTorch 看到的进程可用显存",
    "While the role works": "该角色工作时",
    "With fp32 master weights": "包括 fp32 主权重",
    "The share of the card that the engine may take": "引擎可占用的显存比例",
    "The longest sequence that the engine is built for": "引擎所支持的最长序列",
    "No more than the engine runs at once": "不超过引擎同时运行的数目",
    "In one rollout": "一次 rollout 中",
    "The step less its data-parallel collectives": "一步减去数据并行的集合通信",
    "Gathers and reductions, whatever part of them is hidden": "收集与归约，不论有多少被计算掩盖",
    "Peak before − peak after; below zero it costs memory": "改动前的峰值 − 改动后的峰值；负数表示反而多用",
    "The same times the number of GPUs": "乘以卡数",
    "How many times as long a sequence takes after the change": "改动之后一条序列所用时间是之前的几倍",
    "What the change saves in the phase that it helps most": "在获益最大的阶段节省多少",
    "Of the node that needs most": "需求最大的那个节点",
    "Of the global batch, every sequence at full length": "一个全局批次，每条序列都达到最大长度",
    "Over the whole job": "整个任务",
    "Of a node, at the most": "一个节点的最大值",
    "Below zero: costs": "负数：反而多用",
    "Bus bandwidth": "总线带宽",
}
# Cells, captions, and the lines around tables and charts.
LINES = {
    "yes": "是",
    "no": "否",
    "no {reason*}": "否，{reason}",
    "all": "全部",
    "sum": "合计",
    "one step": "一步",
    "nothing": "无",
    "not published": "未公布",
    "observed": "实测",
    "derived": "推算",
    "on, inline": "开启，内联",
    "off, inline when on": "关闭，开启时内联",
    "on, at no capacity": "开启，不占容量",
    "trained": "受训",
    "scores": "打分",
    "generates": "生成",
    "nothing on the GPU": "不占显卡",
    "stays on the GPU": "留在显卡上",
    "scoring": "打分",
    "{used} of {size#} GB a node, {basis*}": "{used}（每节点 {size} GB，{basis}）",
    "sleeps: its weights go to host memory": "休眠：权重移到主机内存",
    "sleeps: its weights are dropped": "休眠：权重丢弃",
    "{what} always in host memory": "{what}始终在主机内存",
    "{what} go to host memory": "{what}移到主机内存",
    "{what} stay on the GPU": "{what}留在显卡上",
    "states": "优化器状态",
    "the actor, its adapters off": "关掉适配器的 actor",
    "the actor's place, its weights copied there": "actor 的位置，权重复制到那里",
    "LoRA r={rank#}": "LoRA r={rank}",
    "vLLM {version}": "vLLM {version}",
    "SGLang {version}": "SGLang {version}",
    "what a process can use": "进程可用",
    "what a process can use: {size}": "进程可用：{size}",
    "{size} over": "超出 {size}",
    "{size} usable": "可用 {size}",
    "Darker: fuller card, or further over": "颜色越深：卡用得越满，或超出越多",
    "newest cards first": "新卡在前",
    "Numbers": "数值",
    "{gpu} (one die)": "{gpu}（单芯片）",
    "{n#} free": "空余 {n}",
    "{n#} over": "超出 {n}",
    "{n#} before": "之前 {n}",
    "{n#} after": "之后 {n}",
    "{n#} over before": "超出 {n}（之前）",
    "{n#} over after": "超出 {n}（之后）",
    "{n#} loading": "加载时 {n}",
    "{n#} over loading": "超出 {n}（加载时）",
    "{n#} weights flattened": "展平权重时 {n}",
    "{n#} over weights flattened": "超出 {n}（展平权重时）",
    "{n#} optimizer built": "优化器建成时 {n}",
    "{n#} over optimizer built": "超出 {n}（优化器建成时）",
    "{n#} before the first step": "第一次更新前 {n}",
    "{n#} over before the first step": "超出 {n}（第一次更新前）",
    "{n#} after the first step": "第一次更新后 {n}",
    "{n#} over after the first step": "超出 {n}（第一次更新后）",
    "{n#} save": "保存时 {n}",
    "{n#} over save": "超出 {n}（保存时）",
    "what the node can give": "节点可用的内存",
    "time of its own": "计入一步的时间",
    "time hidden behind another term": "被其他部分掩盖的时间",
    "{n#} each": "每张 {n}",
    "{used#} of {size#} GiB in {phase}": "{phase}阶段 {used} / {size} GiB",
    "{used#} of {size#} GiB": "{used} / {size} GiB",
    "Limit": "上限",
    "what a process can use of the card": "进程在卡上可用",
    "The parts as a table": "各部分的数值表",
    "The instants as a table": "各时刻的数值表",
    "The jobs as a table": "各任务的数值表",
    "A column is a GPU: the area of its colour is what all of them together hold. Activations, logits and buffers are "
    "left out; the limit is for all of it.": (
        "一列是一张卡：同色的面积是所有卡合计持有的。激活值、logits 和缓冲区没有画出；上限是对全部而言。"
    ),
    "From left to right in the order of a step, not to scale in time. Of forward, backward and optimizer step the "
    "fullest instant stands for all.": (
        "从左到右为一步的次序，不按时间比例。前向、反向和优化器更新各只画显存最满的一刻。"
    ),
    "The drawing has the first job of each remedy: before the change, and after it.": (
        "图中是每种办法的第一个任务：改动之前和之后。"
    ),
    "A cell opens the calculator with its job, and not with its defaults: {fields!}, and what the cell names.": (
        "点一格会在计算器中打开它的任务；不同于计算器默认值的设置：{fields}，以及格中所写的。"
    ),
    "A cell opens the calculator with its job, and not with its defaults: {fields!}.": (
        "点一格会在计算器中打开它的任务；不同于计算器默认值的设置：{fields}。"
    ),
    "The points as a table": "各点的数值表",
    "The drawing is stacked as the peak is; the horizontal axis is logarithmic, the vertical one linear": (
        "图按峰值的组成堆叠，横轴为对数，纵轴为线性"
    ),
    "{verdict} up to {n#} {axis}": "{n} 以内（{axis}）{verdict}",
    "{verdict} from {n#} on": "{n} 起{verdict}",
    "{verdict} at all lengths up to {n#} {axis}": "直到 {n} 都{verdict}（{axis}）",
    "How far off:": "误差依据：",
    "whole": "不分片",
    "catalog {catalog}, calc {calc}": "目录 {catalog}，calc {calc}",
    "guide {version!}, catalog {catalog!}, calc {calc!}": "本站 {version}，目录 {catalog}，calc {calc}",
    "The Headroom authors. ({year#}). {caption?} (table {id!}, {edition?}; {licence!}) [Data set]. "
    "Headroom. {address!}": (
        "Headroom 作者. ({year}). {caption}（表 {id}，{edition}；{licence}）[数据集]. Headroom. {address}"
    ),
    "The Headroom authors. ({year#}). {title!} ({edition?}; {licence!}). Headroom. {address!}": (
        "Headroom 作者. ({year}). {title}（{edition}；{licence}）. Headroom. {address}"
    ),
    # notes of nodes
    "Boxes of two, four and six are as usual": "两卡、四卡和六卡的机箱也常见",
    "Copies between cards pass through host memory; two RTX 3090 can be bridged instead": (
        "卡间复制要经过主机内存；两张 RTX 3090 也可以用桥接器相连"
    ),
    "Of the slot; without peer-to-peer every byte crosses it into host memory and again out of it": (
        "插槽的带宽；没有点对点时，每个字节都要经它进入主机内存，再经它出来"
    ),
    "Only between cards that share a link": "只在有链路相连的卡之间",
    "one NVLink domain over 18 trays of four GPUs": "一个 NVLink 域，跨 18 个托盘，每个托盘四张卡",
    "Of 300 GB/s in theory": "理论值 300 GB/s",
    "Of 450 GB/s in theory": "理论值 450 GB/s",
    "As sold; configurable to 4 TB": "出厂配置；最多可配 4 TB",
    "The DeepSeek-V3 report counts on 160 GB/s in use": "DeepSeek-V3 的报告按实际 160 GB/s 计算",
    "Download": "下载",
    "{files*} The JSON has the job and the lines behind each cell.": "{files} JSON 中有每一格背后的任务和逐项明细。",
    "CSV": "CSV",
    "Markdown": "Markdown",
    "Cite": "引用",
    "Permalink to this version": "此版本的永久链接",
    "{phase}, at its peak ({moment*}). {job*}": "{phase}，显存峰值时刻（{moment}）。{job}",
    "{task*}, {method}, on {gpus}: the verdict, and what the fullest GPU needs": (
        "{task}，{method}，{gpus}：结论，以及占用最多的那张卡需要多少"
    ),
    "{task*} by memory of the card: which of {n#} models fit": "{task}，按显卡的显存：{n} 个模型中哪些放得下",
    "Of each size the newest card is shown": "每种显存只列最新的一款",
    "the tables have more": "表中有更多显卡",
    "The drawing has {n#} of the models, from small to large": "图中从小到大画出其中 {n} 个模型",
    "the table counts all of them": "表中计入全部模型",
    "How many fit, and the largest or smallest, as a table": "放得下几个，最大或最小的是哪个：以表格显示",
    "Largest that fits": "放得下的最大模型",
    "Another length, another number": "换长度、换卡数",
    "calculator": "计算器",
    "on one GPU": "单卡",
    "on {n#} GPUs": "{n} 卡",
    "{job*}: memory by phase": "{job}：各阶段的显存",
    "{job*}: what to run, and what else": "{job}：该跑什么，还有什么可选",
    "{job*}: before and after": "{job}：改动前后",
    "{job*}: before and after, phase by phase": "{job}：改动前后，逐阶段",
    "{job*}: the command, for {framework}": "{job}：命令（{framework}）",
    "{job*}: {verdict}, so there is no command": "{job}：{verdict}，所以没有命令",
    "{model}, {task*} on {machine}": "{model}，{task}，{machine}",
    "Every remedy on two jobs or more: what it saves, where, and what it costs in time": (
        "每种办法在两个或更多任务上：省多少，省在哪里，多花多少时间"
    ),
    "Needs: peak of the most loaded GPU, context and fragmentation included. Time: of one sequence; a dash where the "
    "catalog has no rate.": (
        "需要：占用最多的那张卡的峰值，包括上下文和碎片。时间：按一条序列计；目录中没有速率的记为短横。"
    ),
    "Changed: {fields}. Verdict: {before} before, {after} after. Host memory of a node: {held} GB before, {holds} GB "
    "after. Time: {time}.": (
        "改动：{fields}。结论：之前{before}，之后{after}。节点的主机内存：之前 {held} GB，之后 {holds} GB。"
        "时间：{time}。"
    ),
    "{times#} times as long a sequence": "每条序列为原来的 {times} 倍",
    "no rate is known": "没有已知的速率",
    "as long": "相同",
    "Framework": "框架",
    "Command": "命令",
    "Setting": "设置",
    "KV cache of each engine: {tokens} tokens, {sequences} sequences of full length ({length} tokens) at once.": (
        "每个引擎的 KV 缓存：{tokens} 个 token，可同时容纳 {sequences} 条满长序列（{length} 个 token）。"
    ),
    "Against a node of {size} GB. What the operating system and other processes take comes on top.": (
        "以 {size} GB 的节点为准。操作系统和其他进程的占用另计。"
    ),
    "Against a node of {size} GB on which jobs are killed from {share} on, that is {limit} GB. What the operating "
    "system and other processes take comes on top.": (
        "以 {size} GB 的节点为准，用到 {share}（即 {limit} GB）时任务被终止。操作系统和其他进程的占用另计。"
    ),
    '<cite lang="zh">{title!}</cite> ({month}, {link!})': ('<cite lang="zh">{title}</cite>（{month}，{link}）'),
    "June 2025": "2025 年 6 月",
    "July 2025": "2025 年 7 月",
    "computed again": "重新计算",
    "Every GPU of the catalog, by the memory a process can use": "目录中的所有显卡，按进程可用显存排序",
    "Each value has its source on the GPU's page. Rates are dense, with fp32 accumulation where that differs.": (
        "每个数值的来源见该显卡的页面。算力为稠密算力；若有区别，取 fp32 累加。"
    ),
    "How GPUs are linked": "显卡如何互连",
    "Sources: see {link*}.": "来源：见{link}。",
    "{gpu} in fp16": "{gpu}（fp16）",
    "one of its two dies": "两个芯片之一",
    "as in the {machine}": "同 {machine}",
    "Consumer cards on PCIe Gen{n}": "PCIe Gen{n} 消费级显卡",
    "PCIe Gen{n} server": "PCIe Gen{n} 服务器",
    "Two A100 PCIe with NVLink bridges": "两张 A100 PCIe，NVLink 桥接",
    "Two A800 PCIe with NVLink bridges": "两张 A800 PCIe，NVLink 桥接",
    "Two H100 PCIe with NVLink bridges": "两张 H100 PCIe，NVLink 桥接",
    "Two Ampere cards with an NVLink bridge": "两张 Ampere 卡，NVLink 桥接",
    "{machine} with {gpu}": "{machine}（{gpu}）",
    "where each value is read": "各数值的出处",
    "Where each value is read": "各数值的出处",
    "all to all": "全互连",
    "hybrid cube mesh": "混合立方网格",
    "NVLink 3 bridge": "NVLink 3 桥接",
    "NVLink 4 bridge": "NVLink 4 桥接",
    "The smallest machines of verl's tuning guide, and ours for the same jobs": (
        "verl 调优指南给出的最小机器，与本指南对同样任务的答案"
    ),
    "Same model, GPU, lengths and batch; five responses a prompt, with a reference model; verl 0.4.": (
        "模型、显卡、长度和批次相同；每条提示五个回答，有参考模型；verl 0.4。"
    ),
    "Theirs: {source*} and the scripts that it names.": "官方：{source}，以及其中提到的脚本。",
    "{model}, GRPO with LoRA": "{model}，GRPO 加 LoRA",
    "Da Vinci": "达芬奇",
    # what is assumed in the tables of what fits
    "OpenRLHF's newest known version and its defaults, 2048 tokens a sequence, micro batch 1 (a pair for the reward "
    "model and for DPO), full activation checkpointing, FlashAttention; LoRA and QLoRA on all linear layers. A cell "
    "shows the first configuration that fits, of those its column may use, and what the fullest GPU then needs; with "
    "offload also what a node must have of its own memory; where the catalog knows no such node and we must assume "
    "that it has less, the cell is tight.": (
        "OpenRLHF 已知的最新版本及其默认值，每条序列 2048 个 token，微批次 1（奖励模型和 DPO 为一对样本），"
        "完整的激活重计算，FlashAttention；LoRA 和 QLoRA 作用于所有线性层。每格给出该列可用的配置中第一个放得下的，"
        "以及占用最多的那张卡此时需要多少；有卸载时还给出节点自身须有的内存，"
        "若目录中没有这种节点、只能假定其内存不够，则标为勉强。"
    ),
    "verl's newest known version on FSDP 2, all else its defaults (vLLM on the same GPUs with tensor parallel 2 and "
    "half of the card, asleep while others work), with a reference model, rewards from a function, prompts of 512 and "
    "responses of 1536 tokens, micro batch 1, full activation checkpointing; LoRA on all linear layers. A cell shows "
    "the first configuration that fits, of those its column may use, and what the fullest GPU then "
    "needs. With offload, "
    "weights and optimizer states wait in host memory, of which a node must have what is shown; where the catalog "
    "knows no such node and we must assume that it has less, the cell is tight. TP 8: tensor parallel 8 "
    "and 0.8 of the card for vLLM.": (
        "verl 已知的最新版本，用 FSDP 2，其余为默认值（vLLM 在同样的卡上，张量并行 2，占一半显存，"
        "别的角色工作时休眠）；"
        "有参考模型，奖励来自函数，提示 512、回答 1536 个 token，微批次 1，完整的激活重计算；LoRA 作用于所有线性层。"
        "每格给出该列可用的配置中第一个放得下的，以及占用最多的那张卡此时需要多少。有卸载时，"
        "权重和优化器状态放在主机内存，"
        "节点须有所示的内存；若目录中没有这种节点、只能假定其内存不够，则标为勉强。"
        "TP 8：张量并行 8，显存的 0.8 给 vLLM。"
    ),
}
# What time goes into.
TERMS = {
    "matrix work": "矩阵乘法",
    "narrow products": "8 位矩阵乘法",
    "attention": "注意力",
    "masked attention": "带掩码的注意力",
    "scan": "状态扫描",
    "selection": "选择性重计算的判断",
    "kernel starts": "内核启动",
    "repacking": "重新打包",
    "orthogonalization": "正交化",
    "launch": "主机派发",
    "reduce": "梯度归约",
    "all-reduce": "all-reduce",
    "overlap": "被掩盖的通信",
    "parameters": "参数",
    "bubble": "流水线空泡",
    "experts": "专家",
    "element-wise": "逐元素运算",
    "dequantise": "反量化",
    "8-bit states": "8 位状态",
    "casts": "类型转换",
    "weight sync": "权重同步",
    "{role}: {term}": "{role}：{term}",
    "{rate#} tokens a second over the whole job; most of the time goes into {term}.": (
        "整个任务每秒 {rate} 个 token；时间主要花在{term}上。"
    ),
}
# A recommendation: its trades, what the next one lacks, notes.
ADVICE = {
    "lacks {size} in {phase}": "在{phase}阶段差 {size}",
    "lacks {size} of host memory ({phase})": "主机内存差 {size}（{phase}）",
    "Next faster: {settings*}: does not start vLLM: {reason*}.": "更快一档：{settings}：vLLM 无法启动：{reason}。",
    "{settings*}: does not start vLLM: {reason*}": "{settings}：vLLM 无法启动：{reason}",
    "does not start vLLM: {reason*}": "vLLM 无法启动：{reason}",
    "Next faster: {settings*}: does not start SGLang: {reason*}.": "更快一档：{settings}：SGLang 无法启动：{reason}。",
    "{settings*}: does not start SGLang: {reason*}": "{settings}：SGLang 无法启动：{reason}",
    "does not start SGLang: {reason*}": "SGLang 无法启动：{reason}",
    "it asks for {wanted} and finds {free} free": "它要用 {wanted}，而空闲 {free}",
    "its share of {share} leaves no room for a KV cache": "占比 {share} 没有给 KV 缓存留下显存",
    "its share of {share} leaves a KV cache of {n} tokens, less than one sequence of {length}": (
        "占比 {share} 留下的 KV 缓存只有 {n} 个 token，放不下一条 {length} 的序列"
    ),
    "{n} GPUs cannot share {heads} key/value heads": "{n} 张卡分不了 {heads} 个键值头",
    "{n#} GPUs instead of {given#} suffice; the closest {miss*}": "把 {given} 张卡换成 {n} 张就够；最接近的配置{miss}",
    "the closest {miss*}": "最接近的配置{miss}",
    "the safest {miss*}": "最稳妥的配置{miss}",
    "nothing was found that gains more than the error of times": "没有找到提速超过时间估计误差的配置",
    "the framework can run no configuration of this job": "框架跑不了这个任务的任何配置",
    "the framework can run no configuration of this job on this machine": "在这台机器上，框架跑不了这个任务的任何配置",
    "Next faster: {miss*}.": "更快一档：{miss}。",
    "Or, {other*}": "或者：{other}",
    "Or: {other*}": "或者：{other}",
    "{trade*}: {settings*}; {peak} at the peak, {rate#} tokens a second over the whole job": (
        "{trade}：{settings}；峰值 {peak}，每秒 {rate} 个 token"
    ),
    "{trade*}: {settings*}; {peak} at the peak": "{trade}：{settings}；峰值 {peak}",
    "trains adapters of rank {rank#} beside {base*}": "在{base}旁训练秩 {rank} 的适配器",
    "frozen weights": "冻结的权重",
    "4-bit weights that stay frozen": "冻结的 4 位权重",
    "serves the weights whole": "权重不量化",
    "trains all weights": "训练全部权重",
    "{optimizer!} with its states on the host": "{optimizer}，其状态放在主机内存",
    "Or: {optimizer!} with its states on the host": "或者：{optimizer}，其状态放在主机内存",
    "{sharding!} instead of Megatron-core, which is harder to set up": (
        "用 {sharding} 代替 Megatron-core：更慢，但更容易搭建"
    ),
    "method full fits, too, with its optimizer offloaded, and takes {times#} times as long": (
        "全参数微调卸载优化器后也放得下，但耗时是它的 {times} 倍"
    ),
    "{optimizer!} with precision {precision!} fits, too, with its optimizer offloaded, and takes {times#} times as "
    "long": ("{optimizer}、精度 {precision} 卸载优化器后也放得下，但耗时是它的 {times} 倍"),
    "weights of 16 bits alone, which stay on the card": "只留 16 位权重，放在卡上",
    "weights of 16 bits alone and states of 8 bits, which stay on the card": (
        "只留 16 位权重和 8 位优化器状态，放在卡上"
    ),
    "adapters of 16 bits, which stay on the card": "16 位适配器，放在卡上",
    "states of 8 bits, which stay on the card": "8 位优化器状态，放在卡上",
    "paged states of 8 bits that step in backward": "分页的 8 位优化器状态，在反向传播中更新",
    "less memory suffices, so the {smaller} instead of the {larger}": "显存更小的卡就够：用 {smaller} 代替 {larger}",
    "{n#} GPUs instead of {many#}": "用 {n} 张卡代替 {many} 张",
    "{n#} GPU instead of {many#}": "用 {n} 张卡代替 {many} 张",
    "{percent#} % more GPU hours": "多用 {percent} % 的 GPU 小时",
    "{trade*}, the fewest that hold it: {hours} times the GPU hours of what is recommended": (
        "{trade}，这是最少的卡数：GPU 小时为推荐配置的 {hours} 倍"
    ),
    "{trade*}, the fewest that hold it: {hours} times the GPU hours of what is recommended: {settings*}; {peak} at the "
    "peak, {rate#} tokens a second over the whole job": (
        "{trade}，这是最少的卡数，GPU 小时为推荐配置的 {hours} 倍：{settings}；峰值 {peak}，每秒 {rate} 个 token"
    ),
    "sequences of {n#} tokens, {times#} times as long": "{n} 个 token 的序列，长度为 {times} 倍",
    "{size} free beside the peak and its error": "除峰值及其误差外还空出 {size}",
    "{setting} saves {size} in {phase}": "{setting}，在{phase}阶段节省 {size}",
    "{setting} would save {size} in {phase}": "{setting}，可在{phase}阶段节省 {size}",
    "{setting} would save {size} in {phase}, for {percent#} % more time": (
        "{setting}，可在{phase}阶段节省 {size}，多用 {percent} % 的时间"
    ),
    "full activation checkpointing": "完整的激活重计算",
    "selective activation checkpointing": "选择性激活重计算",
    "offloading the optimizer": "卸载优化器",
    "offloading the weights": "卸载权重",
    "offloading weights and optimizer": "卸载权重和优化器",
    "Adam on the host": "在主机上运行 Adam",
    "offloading the frozen roles": "卸载冻结的角色",
    "letting vLLM sleep while others work": "别的角色工作时让 vLLM 休眠",
    "letting SGLang sleep while others work": "别的角色工作时让 SGLang 休眠",
    "a share of {share} of the card for vLLM": "把显存的 {share} 给 vLLM",
    "a share of {share} of the card for SGLang": "把显存的 {share} 给 SGLang",
    "{n#} GPUs instead of {given} suffice": "把 {given} 张卡换成 {n} 张就够",
    "method {method!} fits on this machine": "在这台机器上用 {method} 放得下",
    "framework {name!} fits on this machine": "在这台机器上用框架 {name} 放得下",
    "trainer {name!} fits on this machine": "在这台机器上用训练器 {name} 放得下",
    "packing true fits on this machine": "在这台机器上 packing true 放得下",
    "seq_len {length} fits on this machine": "在这台机器上 seq_len {length} 放得下",
    "response_len {length} fits on this machine": "在这台机器上 response_len {length} 放得下",
    "rollout.gpu_memory_utilization {share} fits on this machine": (
        "在这台机器上 rollout.gpu_memory_utilization {share} 放得下"
    ),
    "host_memory {size} (GB a node) fits on this machine, instead of {host*}": (
        "若 host_memory 为 {size}（每节点 GB）就放得下，而不是{host}"
    ),
    "{n#} configurations estimated, {pruned} excluded by quick checks.": (
        "估算了 {n} 种配置，另有 {pruned} 种由快速检查排除。"
    ),
    "host memory: {size} needed of {host*}": "主机内存：需要 {size}，共有{host}",
    "host memory: none needed of {host*}": "主机内存：无需占用，共有{host}",
    "host memory: {size} needed, compared with {host*}": "主机内存：需要 {size}，对照{host}",
    "host memory: compared with {host*}": "主机内存：对照{host}",
    "{size} GB a node, {basis*}": "每节点 {size} GB，{basis}",
    "as given": "由您给出",
    "assumed: {times#} times the memory of its GPUs, as the catalog knows no such node": (
        "假设为其显存总量的 {times} 倍，因为目录中没有这样的节点"
    ),
    "taken from the catalog: CPU and GPU share one memory": "取自目录：CPU 与 GPU 共用一份内存",
    "taken from the catalog: the {size} GB of the {node*}": "取自目录：{node} 有 {size} GB",
    "taken from the catalog: the share of {gpus} of {all} GPUs in the {size} GB of the {node*}": (
        "取自目录：{node} 的 {size} GB 中 {all} 张卡里 {gpus} 张的份额"
    ),
    "a reward model scores, the framework's default; {field} where a function does": (
        "按框架的默认，由奖励模型打分；由函数打分时用 {field}"
    ),
    "precision bf16: no weight has an fp32 copy, and updates of less than 1/512 of it are rounded away": (
        "precision bf16：权重没有 fp32 副本，小于权重 1/512 的更新会被舍入掉"
    ),
    "no reference model runs, the framework's default; {field} adds one for a KL term": (
        "按框架的默认，没有参考模型；{field} 可加上 KL 项所需的那个"
    ),
    "cpu_threads {n}: the cores of each rank, in the catalog's {node*}, with which its Adam steps on the host": (
        "cpu_threads {n}：每个进程分到的 CPU 核数，取自目录中的 {node}，主机上的 Adam 用它们更新"
    ),
    "cpu_threads {n}: the cores of each rank, assumed: {cores} a GPU, with which its Adam steps on the host": (
        "cpu_threads {n}：每个进程分到的 CPU 核数，按每张 GPU {cores} 核假定，主机上的 Adam 用它们更新"
    ),
    "rollout.sleep also sets ds.enable_sleep, as in OpenRLHF's template: optimizer states wait in host memory outside "
    "their own updates": (
        "rollout.sleep 也代表 ds.enable_sleep，与 OpenRLHF 的模板一致：优化器状态在自身更新之外放在主机内存"
    ),
    "this release cannot put the optimizer's states to sleep with this sharding: they stay on the GPU": (
        "这个版本在这种分片下不能让优化器状态休眠：它们留在显卡上"
    ),
    "{reason*}: configurations are ranked by how simple they are": "{reason}：改按配置的简单程度排序",
    "gpu: no source states the {what} of the {gpu}, so its speed is not estimated": (
        "gpu：没有资料给出 {gpu} 的{what}，所以不估算速度"
    ),
    "load_in_8bit: given true, of which no step has been timed, so speed is not estimated": (
        "load_in_8bit：给定 true，尚无计时的训练步，因此不估算速度"
    ),
    "precision: given 'fp32', whose matrix rate the catalog does not have, so speed is not estimated": (
        "precision：给定 'fp32'，目录中没有它的矩阵算力，所以不估算速度"
    ),
    "16-bit matrix rate": "16 位矩阵算力",
    "memory bandwidth": "显存带宽",
    "framework {name!}: none was asked for; {several!} are tried in this order": (
        "framework {name}：未指定框架；依次尝试了 {several}"
    ),
    "rollout.n {n#}: GRPO compares the responses of a group, and the framework's own number is {usual}": (
        "rollout.n {n}：GRPO 比较一组回答，而框架自己的默认值是 {usual}"
    ),
    "rollout.batch {n#}: the framework's own number cannot be shared by {gpus} GPUs": (
        "rollout.batch {n}：框架自己的默认值不能由 {gpus} 张卡平分"
    ),
    "{place@} {length#}: the framework's own {own} has no room for the {tokens} tokens of a sample's images": (
        "{place} {length}：框架自己的默认值 {own} 容不下一个样本的图像所占的 {tokens} 个 token"
    ),
    "no command: {reason*}": "没有命令：{reason}",
    "The fork runs {rows} sequences in one forward: it multiplies its micro-batch flag, here {micro} for each GPU, by "
    "rollout.n = {n#}, so that {least} are the least, and a GPU's whole rollout, {whole}, the most.": (
        "该分支一次前向处理 {rows} 条序列：它把微批次参数（这里每张卡 {micro}）乘以 rollout.n = {n}，"
        "所以最少 {least} 条，"
        "最多是一张卡的整个 rollout，即 {whole} 条。"
    ),
    "{setting} has no effect with sharding {sharding}: the weights stay on the GPU": (
        "sharding {sharding} 下 {setting} 不起作用：权重留在显卡上"
    ),
    "seq_len {n#} is beyond the {most} positions of {model}": "seq_len {n} 超过 {model} 的 {most} 个位置",
    "{kind!} came with transformers {first!}: transformers {version!} runs the code beside its weights, which is "
    "computed as its own": (
        "{kind} 自 transformers {first} 起才有：transformers {version} 运行权重旁附带的代码，"
        "这里按 transformers 自己的实现计算"
    ),
    "{model} makes embeddings, without an output head: task rm, also without one, is nearest": (
        "{model} 生成嵌入向量，没有输出头：task rm 同样没有，与其训练最接近"
    ),
    "{model} answers yes or no: task sft trains that, task rm a scalar in place of its output head": (
        "{model} 回答 yes 或 no：task sft 训练的正是这个，task rm 则以标量头代替输出头"
    ),
    "{spoken!} reads images by a part that is not modelled: computed as its language model alone, over text": (
        "{spoken} 会读图像，这一部分不在计算范围内：只按它的语言模型、对文本计算"
    ),
    "{tuned!} is not in the catalog: computed as {model}": "目录中没有 {tuned}：按名称所指的 {model} 计算",
    "the checkpoint is in MXFP4, which does not train: computed from weights that were dequantised to bf16": (
        "检查点是 MXFP4 格式，不能训练：按反量化为 bf16 的权重计算"
    ),
    "an adapter beside weights stored as {form!} is computed as QLoRA, whose 4 bits take nearly as much": (
        "在以 {form} 存储的权重旁训练适配器：按 QLoRA 计算，其 4 位所占大小几乎相同"
    ),
    "the checkpoint's weights are stored as {form!}: computed from weights that were dequantised to bf16": (
        "检查点的权重以 {form} 存储：按反量化为 bf16 的权重计算"
    ),
    "{model} without images is its language model alone: with images its vision tower counts, too": (
        "{model} 没有 images 时只算语言模型；给出 images 则视觉塔也计入"
    ),
    "{model} is computed without sound: the part that hears is loaded, and does not run": (
        "{model} 按不含语音计算：处理语音的部分会加载，但不运行"
    ),
    "{model} without images reads text alone: images.width and images.height say their size": (
        "{model} 没有 images 时只读文本：images.width 与 images.height 说明图像多大"
    ),
    "routed experts stay in 16 bits: Transformers 5 has fused them, and 4-bit loading takes linears alone": (
        "路由专家保持 16 位：Transformers 5 把它们融合了，而 4 位加载只处理线性层"
    ),
    "the linears with adapters are named one by one in place of all-linear: {reason*}": (
        "带适配器的线性层逐一写出，不用 all-linear：{reason}"
    ),
    "{size!} of paged optimizer states leave for host memory and come back for each step, which takes longer": (
        "分页优化器状态中有 {size} 移到主机内存，每一步再移回，因此更慢"
    ),
    "the allocator is not replayed: that would take more than {n#} events, so the median of what other jobs lost "
    "stands for fragmentation": "没有重放分配器：那需要超过 {n} 个事件，因此碎片取其他任务损失的中位数",
    "the allocator may need up to {size!} less than it is given here: a closer search would take more than {n#} "
    "events": "分配器所需可能比这里给出的最多少 {size}：更精细的搜索需要超过 {n} 个事件",
    "the allocator is not replayed for all remedies: that would take more than {n#} events, so the median of what "
    "other jobs lost stands for fragmentation in some": (
        "并非所有补救办法都重放了分配器：那需要超过 {n} 个事件，因此其中一些的碎片取其他任务损失的中位数"
    ),
    "PEFT refuses the out_proj of these state spaces": "PEFT 拒绝适配这些状态空间层的 out_proj",
    "PEFT's adapter fails beside o_a_proj, which multiplies group by group": (
        "PEFT 的适配器在 o_a_proj 旁会出错，因为它逐组相乘"
    ),
    "PEFT would adapt routed experts, too": "PEFT 会连路由专家一起适配",
    "PEFT would wrap the router, too, and fail on what it returns": "PEFT 会连路由器一起包装，并因其返回值而出错",
    "all-linear is computed without routed experts; PEFT 0.21 adapts those of some families too": (
        "all-linear 不含路由专家；PEFT 0.21 对某些系列也会适配它们"
    ),
    "{name!} {version} is computed as {known}, the nearest version that is known": (
        "{name} {version} 按已知的最近版本 {known} 计算"
    ),
    "the {gpu} has no bf16: take precision fp16, with torch, its trainers or trl": (
        "{gpu} 没有 bf16：用 precision fp16，配 torch、它的训练器或 trl"
    ),
    "weights in float8 {recipe!} are counted in two layouts, of which Transformer Engine needs one on Blackwell": (
        "float8 {recipe} 的权重按两种布局计算，Transformer Engine 在 Blackwell 上只需一种"
    ),
    "{form!} needs a Blackwell card: torchao's kernels do not run on the {gpu}": (
        "{form} 需要 Blackwell 卡：torchao 的内核不能在 {gpu} 上运行"
    ),
    "llama3_8b_mxfp8 converts the head, too, whose casts are not counted": (
        "llama3_8b_mxfp8 也转换输出头，它的类型转换没有计入"
    ),
    "FlashAttention-2 does not run on the {gpu}, a {kind} card: take sdpa": (
        "FlashAttention-2 不能在 {gpu}（{kind} 架构）上运行：用 sdpa"
    ),
    "FlashAttention-2 takes no heads of {n}, as some layers of this model have: take sdpa": (
        "FlashAttention-2 不支持大小为 {n} 的注意力头，而这个模型的一些层正是如此：用 sdpa"
    ),
    "FlashAttention-2 does not run for models of the family {family}: take eager": (
        "FlashAttention-2 不支持 {family} 系列的模型：用 eager"
    ),
    "vLLM's wheels from 0.21 on have no kernels for the {gpu}: generate with rollout.engine hf": (
        "vLLM 自 0.21 起的发行包没有 {gpu} 的内核：用 rollout.engine hf 生成"
    ),
    "PyTorch's builds for ROCm have expandable segments from {version} on: computed without": (
        "PyTorch 的 ROCm 版本自 {version} 起才有可扩展段：按没有计算"
    ),
    "nobody has measured what a process takes besides its tensors on the {gpu}: an NVIDIA card's figure is used": (
        "{gpu} 上进程在张量以外的占用没有实测：按 NVIDIA 显卡计"
    ),
    "attention flash with sinks is a kernel that Transformers fetches with the package kernels: "
    "kernels-community/vllm-flash-attn3, built for Ampere and Hopper": (
        "带 sinks 的 flash 注意力是 Transformers 用 kernels 包获取的内核：kernels-community/vllm-flash-attn3，"
        "为 Ampere 和 Hopper 编译"
    ),
    "attention flash with sinks is kernels-community/vllm-flash-attn3, built for Ampere and Hopper, not for the {gpu}: "
    "take eager": (
        "带 sinks 的 flash 注意力是 kernels-community/vllm-flash-attn3，"
        "为 Ampere 和 Hopper 编译，不支持 {gpu}：用 eager"
    ),
    "PyTorch from 2.11 on has kernels for the {gpu} in its builds for CUDA 12.6 alone": (
        "PyTorch 自 2.11 起只在 CUDA 12.6 的构建中有 {gpu} 的内核"
    ),
    "state spaces are taken to run in the kernels of mamba-ssm and causal-conv1d": (
        "状态空间层按 mamba-ssm 与 causal-conv1d 的 kernel 计算"
    ),
    "state spaces are taken to run in PyTorch's operations, without mamba-ssm": (
        "状态空间层按 PyTorch 的逐个算子计算，没有 mamba-ssm"
    ),
    "xIELU is taken to run in PyTorch's operations; its kernel keeps far less: kernels xielu says how much": (
        "xIELU 按 PyTorch 的逐个算子计算；它的 kernel 保留的张量少得多：设 kernels 为 xielu 即可看到"
    ),
    "kernels foak: fms-acceleration-foak with fast_loss, fast_rms_layernorm and fast_rope_embeddings": (
        "kernels foak：安装 fms-acceleration-foak，并打开 fast_loss、fast_rms_layernorm 与 fast_rope_embeddings"
    ),
    "kernels xielu: install github.com/nickjbrowning/XIELU, which Transformers then takes by itself": (
        "kernels xielu：安装 github.com/nickjbrowning/XIELU，Transformers 随后会自动使用它"
    ),
    "linear attention is taken to run in the kernels of flash-linear-attention and causal-conv1d": (
        "线性注意力按 flash-linear-attention 与 causal-conv1d 的 kernel 计算"
    ),
    "without them Transformers keeps far more: linear_attention torch says how much": (
        "没有它们时 Transformers 保留的张量多得多：设 linear_attention 为 torch 即可看到"
    ),
    "linear attention is taken to run in PyTorch's operations, without flash-linear-attention": (
        "线性注意力按 PyTorch 的逐个算子计算，没有 flash-linear-attention"
    ),
    "its kernels keep far less: linear_attention fla says how much": (
        "它的 kernel 保留的张量少得多：设 linear_attention 为 fla 即可看到"
    ),
    "bitsandbytes, which {what} need, has no kernels for the {gpu}": "{what}需要 bitsandbytes，而它没有 {gpu} 的内核",
    "4-bit weights": "4 位权重",
    "states of 8 bits": "8 位优化器状态",
}
# Notes on a command.
COMMANDS = {
    "set {name?}: {what*}": "设置 {name}：{what}",
    "a data set in TRL's format for {task!}": "TRL 格式的 {task} 数据集",
    "name or path of the training data": "训练数据的名称或路径",
    "name or path of the prompts": "提示数据的名称或路径",
    "your data; {keys} and {template} say how to read it": "您的数据；{keys} 和 {template} 说明如何读取",
    "your prompts; --data.input_key and --data.apply_chat_template say how to read them": (
        "您的提示；--data.input_key 和 --data.apply_chat_template 说明如何读取"
    ),
    "a reward model of the size of the one computed": "与所计算的同样大小的奖励模型",
    "a reward model made of {model}": "由 {model} 做成的奖励模型",
    "{model} in bf16, as saved after Mxfp4Config(dequantize=True)": (
        "bf16 的 {model}，即 Mxfp4Config(dequantize=True) 之后保存的"
    ),
    "the model whose config.json is {name}": "config.json 为 {name} 的模型",
    "what scores the responses": "给回答打分的东西",
    "address of a reward server, or reward_func.py": "奖励服务的地址，或 reward_func.py",
    "file that lists the nodes": "列出各节点的文件",
    "a line {line} for each node, which the launcher reaches by ssh": "每个节点一行 {line}，启动器通过 ssh 访问",
    "parquet files with a column {column} of chat messages": "parquet 文件，{column} 列为聊天消息",
    "parquet file with a column {column} of chat messages": "parquet 文件，{column} 列为聊天消息",
    "parquet file of the training prompts": "训练提示的 parquet 文件",
    "parquet file of the validation prompts": "验证提示的 parquet 文件",
    "parquet file of the conversations": "对话的 parquet 文件",
    "rewards come from the function for the data's {source}, or reward.custom_reward_function.path": (
        "奖励来自数据 {source} 对应的函数，或 reward.custom_reward_function.path"
    ),
    "{files!}: put into the folder where the command runs": "{files}：放到运行命令的目录",
    "computed for {framework!} with {libraries!}; other versions may need more or less memory": (
        "按 {framework} 与 {libraries} 计算；其他版本的显存可能不同"
    ),
    "learning rate, epochs and how often it saves are the framework's defaults: they do not affect memory": (
        "学习率、轮数和保存频率用框架默认值：它们不影响显存"
    ),
    "checkpoint_gb {n#} is the size of the files that are loaded, which no flag sets": (
        "checkpoint_gb {n} 是所加载文件的大小，没有参数可设"
    ),
    "vision_tower true: the class that your trainer loads decides, such as AutoModelForImageTextToText": (
        "vision_tower true：取决于训练器加载的类，例如 AutoModelForImageTextToText"
    ),
    "expected_len {n#} is the mean length of your data, which no flag sets": (
        "expected_len {n} 是您数据的平均长度，没有参数可设"
    ),
    "rollout.fullest_len {n#} is the mean length in the fullest micro batch, which no flag sets": (
        "rollout.fullest_len {n} 是最满的微批次里的平均长度，没有参数可设"
    ),
    "{field!}: {framework!} has no flag for it, and runs {value!}": (
        "{field}：{framework} 没有这个参数，运行时为 {value}"
    ),
    "{field!} {given!}: {framework!} has no flag for it, and runs {value!}": (
        "{field} {given}：{framework} 没有这个参数，运行时为 {value}"
    ),
    "on each of the {nodes} nodes (gpus_per_node {n#})": "在 {nodes} 个节点上各运行一次（gpus_per_node {n}）",
    "{where}: ray start, with --head on the one where the command runs, else --address of that": (
        "{where}：ray start，运行命令的节点用 --head，其余用它的 --address"
    ),
    "run it on every node, with NODE_RANK, MASTER_ADDR and the files there": (
        "在每个节点上运行，带上 NODE_RANK、MASTER_ADDR 和这些文件"
    ),
    "0 on the first node, then 1, 2, ...": "第一个节点为 0，然后 1、2……",
    "address of the first node": "第一个节点的地址",
    "import path of a reward function": "奖励函数的导入路径",
    "a function's import path, or the name of one of TRL's own": "函数的导入路径，或 TRL 自带函数的名称",
    "prompts are not cut: keep them within prompt_len {n#}": "提示不会被截断：请控制在 prompt_len {n} 以内",
    "--data.max_len bounds prompt and response together; keep prompts within prompt_len {n#}": (
        "--data.max_len 限制提示与回答之和；请把提示控制在 prompt_len {n} 以内"
    ),
    "FSDP has one switch for offload: parameters and optimizer states go to host memory together": (
        "FSDP 只有一个卸载开关：参数和优化器状态一起移到主机内存"
    ),
    "roles.reference none: under FSDP TRL loads a reference even where its log-probabilities are precomputed": (
        "roles.reference none：FSDP 下即使预先算好对数概率，TRL 也会加载参考模型"
    ),
    "roles share GPUs without vLLM only where training is asynchronous: --train.async_enable": (
        "只有异步训练（--train.async_enable）时，角色才能在没有 vLLM 的情况下共用显卡"
    ),
}
CALCULATOR = {
    "Calculator": "计算器",
    "Task": "任务",
    "GPU": "显卡",
    "How many": "几张",
    "any": "不限",
    "the smallest that runs it": "能跑的最小的卡",
    "Method, framework, lengths": "方法、框架、长度",
    "Precision, sharding, offload, batches": "精度、分片、卸载、批次",
    "Rollout, placement, roles": "rollout、放置、角色",
    "Nodes and host memory": "节点与主机内存",
    "the calculator chooses": "由计算器选择",
    "the framework's default": "框架的默认值",
    "as they are sold": "按整机出售的数目",
    "LoRA rank": "LoRA 的秩",
    "Framework and version": "框架与版本",
    "newest": "最新",
    "Mean real length, tokens": "平均实际长度（token）",
    "Mean response, tokens": "平均回答长度（token）",
    "Images a sample": "每条样本的图片数",
    "1, if there are any": "有图片时为 1",
    "Width of an image, pixels": "图片宽度（像素）",
    "Height of an image, pixels": "图片高度（像素）",
    "no images": "无图片",
    "Images, or videos, in a sample; 1 when absent.": "每条样本中的图片或视频数；未填时为 1。",
    "Width of an image in pixels, before the image processor resizes it.": "图片宽度（像素），缩放之前。",
    "Height of an image in pixels, before the image processor resizes it.": "图片高度（像素），缩放之前。",
    "Settings left open": "没有填的设置",
    "search for the best": "搜索最好的",
    "take the framework's defaults": "用框架的默认值",
    "A model of your own: its config.json": "您自己的模型：它的 config.json",
    "The config.json of a Hugging Face model, chosen, dropped or pasted here. It stays in this browser: a link to the "
    "job does not carry it.": (
        "Hugging Face 模型的 config.json，在这里选取、拖入或粘贴。它只留在这个浏览器里：任务的链接不会带上它。"
    ),
    "{model}, a file of your own: it stays in this browser, and a link to this job does not carry it": (
        "{model}，您自己的文件：它只留在这个浏览器里，任务的链接不会带上它"
    ),
    "The same shapes": "形状相同的模型",
    "Micro batch": "微批次",
    "Precision": "精度",
    "Sharding": "分片",
    "Optimizer in host memory": "优化器放在主机内存",
    "Weights in host memory": "权重放在主机内存",
    "Placement": "放置",
    "all on the same GPUs": "共用全部显卡",
    "What generates": "由谁生成",
    "vLLM's share of the card": "vLLM 的显存占比",
    "vLLM's tensor parallel": "vLLM 的张量并行",
    "Responses for a prompt": "每条提示的回答数",
    "vLLM sleeps": "vLLM 休眠",
    "Reference model": "参考模型",
    "Critic model": "critic 模型",
    "Teacher model": "教师模型",
    "runs": "运行",
    "does not run": "不运行",
    "every layer": "每一层",
    "selective": "选择性",
    "all tokens at once": "所有 token 一次算完",
    "in chunks": "分块",
    "in kernels alone": "只在 kernel 内",
    "of some of the vocabulary at a time": "每次只算一部分词表",
    "fused": "融合",
    "GPUs in a node": "每个节点的卡数",
    "Searched: the simplest configuration that fits and is as fast as any. Defaults: the job as you state it.": (
        "搜索：在放得下、并且不比任何别的配置慢的那些里，取最简单的。默认值：就按您所写的任务计算。"
    ),
    # what the fields mean, as the schema says
    "What is trained: every weight, adapters beside frozen weights, or adapters beside 4-bit weights.": (
        "训练什么：全部权重，冻结权重旁的适配器，或 4 位权重旁的适配器。"
    ),
    "Rank r of an adapter, a count.": "适配器的秩 r，一个数目。",
    "What runs the job, optionally with its version: torch (plain PyTorch and Transformers, nothing hidden), openrlhf, "
    "verl, trl or slime, as in openrlhf==0.6. The newest known version when none is named. A trainer's name, as in "
    "unsloth or ms-swift==4.6, is torch with that trainer, in that release.": (
        "由什么运行任务，可带版本：torch（纯 PyTorch 和 Transformers，没有隐藏的东西）、openrlhf、verl、trl 或 slime，"
        "如 openrlhf==0.6。不写版本时为已知的最新版本。写训练器的名字，如 unsloth 或 ms-swift==4.6，"
        "即 torch 加该训练器的该版本。"
    ),
    "Length cap of a sequence, in tokens; RL tasks use prompt_len and response_len.": (
        "一条序列的长度上限，以 token 计；强化学习任务用 prompt_len 和 response_len。"
    ),
    "Length cap of a prompt, in tokens, for RL tasks.": "强化学习任务中一条提示的长度上限，以 token 计。",
    "Length cap of a response, in tokens, for RL tasks.": "强化学习任务中一个回答的长度上限，以 token 计。",
    "Mean length of a response, in tokens; where it is left open, expected_len is divided between prompt and response "
    "as their caps are. Alone it says expected_len, with prompts of prompt_len.": (
        "回答的平均长度（token）；不给定时，expected_len 按提示与回答的上限之比分给两者。"
        "单独给定时，expected_len 取 prompt_len 加上它。"
    ),
    "Mean length of the sequences in the fullest micro batch of a run, prompts and responses together, in tokens, "
    "where padding is removed and a micro batch is a count; expected_len when absent.": (
        "去掉填充且微批次以条数计时，一次运行中最满的微批次里序列的平均长度（提示加回答，token）；"
        "不填则为 expected_len。"
    ),
    "Mean real length of a sequence, in tokens, where padding is removed or batches are packed; the cap when absent, "
    "or what lengths say. With max_tokens_per_gpu a forward pass holds max_tokens_per_gpu / expected_len sequences of "
    "it. Step times count sequences with it in any case.": (
        "去掉填充或打包时，一条序列的平均实际长度，以 token 计；不填则为上限，或由 "
        "lengths 决定。有 max_tokens_per_gpu 时，"
        "一次前向有 max_tokens_per_gpu / expected_len 条这样的序列。一步的时间总是按它计算序列。"
    ),
    "Whether sequences are packed so that no padding is computed.": "是否把序列打包，使填充不参与计算。",
    "Whether batches are made of sequences of about the same length, from the longest to the shortest within a part of "
    "the data, as Transformers' Trainer does with group_by_length. Less padding is computed and the longest batch "
    "comes first; the peak is that of the same batch.": (
        "是否把长度相近的序列组成批次，在数据的每一部分内由长到短，如 Transformers 的 Trainer 的 group_by_length。"
        "参与计算的填充更少，最长的批次最先出现；峰值仍是同一个批次的峰值。"
    ),
    "Sequences (pairs for rm, dpo, orpo and simpo) in one optimizer step over all GPUs, a count.": (
        "所有卡在一次优化器更新中的序列数（rm、dpo、orpo 和 simpo 为样本对数）。"
    ),
    "Sequences (pairs for rm, dpo, orpo and simpo) on one GPU in one forward pass, a count; not read where batches are "
    "dynamic.": ("一张卡一次前向的序列数（rm、dpo、orpo 和 simpo 为样本对数）；动态批次时不用。"),
    "Number formats of weights, gradients and optimizer states. bf16: all bf16. mixed: bf16 weights, fp32 master "
    "weights and states (DeepSpeed, Megatron). fsdp-mixed: fp32 shards, bf16 compute. autocast: fp32 weights under "
    "torch.autocast. fp16: as mixed under DeepSpeed, else as autocast, in fp16 and with a loss scaler, for cards "
    "without bf16; a base that stays frozen is in fp16. fp32: all fp32.": (
        "权重、梯度和优化器状态的数值格式。bf16：全部 bf16。mixed：bf16 权重，fp32 "
        "主权重和状态（DeepSpeed、Megatron）。"
        "fsdp-mixed：fp32 分片，bf16 计算。autocast：torch.autocast 下的 fp32 权重。fp16：在 DeepSpeed 下同 mixed，"
        "否则同 autocast，但用 fp16 和损失缩放，用于没有 bf16 的卡；冻结的基座为 fp16。fp32：全部 fp32。"
    ),
    "Whether Transformer Engine's FusedAdam keeps the master weights of Megatron-core's distributed optimizer: the low "
    "16 bits of each, as the weight is the high ones. Formats other than fp32 and gradients in bf16 need it.": (
        "Megatron-core 分布式优化器的主权重是否由 Transformer Engine 的 FusedAdam 保存："
        "每个只存低 16 位，高位即权重本身。"
        "状态用 fp32 以外的格式或梯度用 bf16 时需要它。"
    ),
    "Number format of these master weights.": "这些主权重的数值格式。",
    "Number format of Adam's first moment, with use_precision_aware_optimizer.": (
        "Adam 一阶矩的数值格式，与 use_precision_aware_optimizer 同用。"
    ),
    "Number format of Adam's second moment, with use_precision_aware_optimizer.": (
        "Adam 二阶矩的数值格式，与 use_precision_aware_optimizer 同用。"
    ),
    "The optimizer; none: nothing is trained.": "优化器；none：不训练任何东西。",
    "How the data-parallel GPUs share weights, gradients and optimizer states; megatron: Megatron-core's distributed "
    "optimizer, with trainer megatron, or with verl.": (
        "数据并行的各卡怎样分担权重、梯度和优化器状态；"
        "megatron 为 Megatron-core 的分布式优化器，与训练器 megatron 同用，或与 verl 同用。"
    ),
    "Whether optimizer states and master weights live in host memory.": "优化器状态和主权重是否放在主机内存。",
    "Whether the weights live in host memory.": "权重是否放在主机内存。",
    "Layers that Megatron-core runs again together, from one checkpoint, a count; one where it is left open: "
    "--recompute-num-layers with the uniform method.": (
        "Megatron-core 由同一个检查点一起重算的层数；留空为一层：uniform 方式下的 --recompute-num-layers。"
    ),
    "Depths of multi-token prediction that Megatron-core trains behind the last layer, a count; none where it is left "
    "open. Each has a layer, logits and a loss of its own: --mtp-num-layers.": (
        "Megatron-core 在最后一层之后训练的多 token 预测（MTP）深度数；留空则没有。"
        "每个深度都有自己的一层、logits 和损失：--mtp-num-layers。"
    ),
    "Share of the trained parameters whose Adam steps on the host, where their master weights and states stay, by "
    "Megatron-core's hybrid device optimizer: optimizer_offload_fraction, with optimizer_cpu_offload.": (
        "由 Megatron-core 的混合设备优化器在主机上用 Adam 更新的可训练参数的比例，这些参数的主权重和状态留在主机上："
        "optimizer_offload_fraction，与 optimizer_cpu_offload 同用。"
    ),
    "Whether fp32 master weights leave the GPU with the states of that share, as with use_precision_aware_optimizer. "
    "Without it the hybrid device optimizer copies them, and they stay.": (
        "这部分参数的 fp32 主权重是否随状态一起离开显卡，即使用 use_precision_aware_optimizer。"
        "否则混合设备优化器只复制它们，它们仍留在显卡上。"
    ),
    "Activation recomputation: none; full: every layer, from its input; selective: PyTorch's, which keeps attention "
    "and every second matrix product of a layer (torchtitan's policy for operators), or Megatron-core's, of "
    "recompute_modules.": (
        "激活重计算：none 为不开；full 为每一层都从输入重算；selective 为 PyTorch 的选择性重计算，"
        "保留注意力和每层中每两个矩阵乘积的一个（torchtitan 按算子的策略），"
        "或 Megatron-core 的，由 recompute_modules 指定部分。"
    ),
    "Attention kernel. flash: FlashAttention. sdpa: PyTorch's, without a padding mask. eager: the scores are written "
    "out.": "注意力内核。flash：FlashAttention。sdpa：PyTorch 自带，不带填充掩码。eager：写出全部注意力分数。",
    "How logits and cross entropy are computed: all tokens at once, in chunks, fused with the head so that logits are "
    "never whole (Liger's), cut (cut-cross-entropy, whose logits never leave its kernels), or vocab-chunked "
    "(log-probabilities and entropies from the logits of 2,048 entries of the vocabulary at a time, as prime-rl's head "
    "makes them).": (
        "logits 和交叉熵怎样计算：所有 token 一次算完，分块，与输出头融合而从不产生完整的 logits（Liger），"
        "用 cut-cross-entropy，logits 不离开 kernel，或用 vocab-chunked，每次由词表中 2,048 个词的 logits "
        "算对数概率和熵，如 prime-rl 的输出头。"
    ),
    "GPUs that share each layer's matrices, a count.": "共同分担每层矩阵的卡数。",
    "GPUs that share the tokens of a sequence, a count (ms-swift's sequence_parallel_size).": (
        "共同分担一条序列的 token 的卡数（ms-swift 的 sequence_parallel_size）。"
    ),
    "Whether all roles share the same GPUs or each has its own.": "所有角色共用显卡，还是各用各的。",
    "What generates: vLLM, SGLang, Transformers' generate, or nothing in this job.": (
        "由谁生成：vLLM、SGLang、Transformers 的 generate，或这个任务中不生成。"
    ),
    "Whether Megatron-LM's data loader makes a mask of all pairs of a sequence's positions, a byte each, which its "
    "fused kernels do not read: off with --no-create-attention-mask-in-dataloader.": (
        "Megatron-LM 的数据加载器是否为序列的所有位置对生成掩码（每对一个字节，其融合内核并不读取）："
        "用 --no-create-attention-mask-in-dataloader 关闭。"
    ),
    "Share of the card that an engine may take, above 0 to 1, no unit: vLLM's gpu_memory_utilization, or SGLang's "
    "mem_fraction_static, weights and KV cache alone.": (
        "引擎可占用的显存比例，大于 0、不大于 1，无单位：vLLM 的 gpu_memory_utilization，或 SGLang 的 "
        "mem_fraction_static，后者只含权重和 KV 缓存。"
    ),
    "GPUs that share one engine's model, a count.": "共同分担一个引擎的模型的卡数。",
    "Responses for one prompt, a count.": "一条提示的回答数。",
    "Whether an engine gives its memory back outside the rollout.": "引擎在 rollout 之外是否交还显存。",
    "The frozen model from whose distributions the student of gkd learns; as large as the student unless its model is "
    "given.": "gkd 的学生所学习的冻结教师模型；不指定模型时与学生一样大。",
    "Weight of a cross entropy beside gkd's divergence, or of the chosen responses beside dpo's loss, no unit: "
    "ms-swift's sft_alpha and rpo_alpha. Any above 0 takes the same memory.": (
        "gkd 的散度之外的交叉熵的权重，或 dpo 损失之外 chosen 回答的交叉熵的权重，无单位：ms-swift 的 sft_alpha 与 "
        "rpo_alpha。只要大于 0，占用的显存就相同。"
    ),
    "The size in GB (10^9 bytes) of the files of a 4-bit checkpoint that leaves some linears in 16 bits, as Unsloth's "
    "dynamic quantisation does: what is more than four bits of every linear take.": (
        "把部分线性层留在 16 位的 4 bit 检查点（如 Unsloth 的动态量化）的文件大小，单位 GB（10^9 字节）："
        "超出所有线性层都用 4 bit 的部分。"
    ),
    "Whether a job that reads text alone loads the model's vision tower all the same, frozen, as "
    "AutoModelForImageTextToText does.": (
        "只读文本的任务是否仍加载模型的视觉塔（冻结），如 AutoModelForImageTextToText 那样。"
    ),
    "Share of gkd's batches whose responses the student generates first (lmbda), 0 to 1, no unit.": (
        "gkd 中由学生先生成回答的批次占比（lmbda），0 到 1，无单位。"
    ),
    "on_policy: what the student generates is held in memory; the time it takes is not computed": (
        "on_policy：学生生成时的显存已计入，所用时间没有计算"
    ),
    "student and teacher have other vocabularies: the copies that pad the smaller one are not computed": (
        "学生与教师的词表大小不同：没有计算补齐较小词表的副本"
    ),
    "teacher": "教师模型",
    "The frozen model that dpo, kto and RL compare with; none: its log-probabilities are computed beforehand. With "
    "method full, a policy with adapters has a second model beside it, in 16 or 32 bits.": (
        "dpo、kto 和强化学习用来比较的冻结模型；none：预先算好它的对数概率。"
        "方法为 full 时，带适配器的策略旁边另有一个 16 位或 32 位的模型。"
    ),
    "The value model of ppo.": "ppo 的价值模型。",
    "The reward model of RL; none: it runs elsewhere.": "强化学习的奖励模型；none：在别处运行。",
    "GPUs in one node, a count; a job of more GPUs fills whole nodes.": "一个节点的卡数；更多卡的任务占满整数个节点。",
    "Threads of the CPU that each rank has, with which an optimizer on the host steps: OMP_NUM_THREADS. Where it is "
    "left open: as many as the launcher leaves, one under torchrun, accelerate and Ray, and with DeepSpeed's launcher "
    "all cores.": (
        "每个进程的 CPU 线程数，主机上的优化器用它们更新：OMP_NUM_THREADS。不填时由启动器决定："
        "torchrun、accelerate 和 Ray 下为 1，DeepSpeed 启动器下为全部核。"
    ),
    "Host memory of a node that the job may use, GB (10^9 bytes). Where it is left open: the share of the node in the "
    "catalog that the job's GPUs have, or twice the GPUs' memory where the catalog knows none.": (
        "任务在一个节点上可用的主机内存，GB（10^9 字节）。不填时：目录中该节点的内存按任务所用卡数的份额；"
        "目录中没有这样的节点时，为显存的两倍。"
    ),
    # the filters of heatmaps
    "Filter": "筛选",
    "Vendor": "厂商",
    "Card's memory": "显存容量",
    "Family": "模型系列",
    "models": "个模型",
    "cards": "种显卡",
    "Method": "方法",
    "full if it fits, else LoRA, else QLoRA": "能全量就全量，否则 LoRA，再否则 QLoRA",
    "Sequences or pairs a step": "每步的序列数或样本对数",
    "Tokens a prompt": "每条提示的 token 数",
    "Host memory, GB a node": "主机内存，每节点 GB",
    "CPU threads of a rank": "每个进程的 CPU 线程数",
    "its launcher's": "由启动器决定",
    "its share": "按份额",
    "What do I run?": "该怎么跑？",
    "Copy link": "复制链接",
    "Stop": "停止",
    "Provisional: PyTorch's allocator is being replayed, which may change the verdict.": (
        "暂定结果：正在重放 PyTorch 的分配器，结论可能改变。"
    ),
    "Without JavaScript the calculator has this one answer; the tables below have the rest.": (
        "没有 JavaScript 时计算器只有这一个答案，其余见下面的表格。"
    ),
    "The scenario file, to copy or to change": "场景文件，可复制或修改",
    "Save it, and ask {command}; or change it here.": "保存后运行 {command}；也可以在这里修改。",
    "Scenario file": "场景文件",
    "Copy": "复制",
    "Estimate it": "估算",
    "Run": "运行",
    "The closest": "最接近的",
    "It": "缺口",
    "What would have to change": "需要改变什么",
    "Peak": "峰值",
    "{peak} of {usable} usable on each card, in {phase}; {tensors} of it tensors. It fits with a probability of "
    "{probability}; for {wanted}, a card needs {needed} usable": (
        "每张卡可用 {usable}，峰值 {peak}，出现在{phase}；其中张量 {tensors}。放得下的概率：{probability}；"
        "概率要达到 {wanted}，可用显存需有 {needed}"
    ),
    "more than 99 %": "99 % 以上",
    "less than 1 %": "不到 1 %",
    "{size} at the most, of {host*}": "最多 {size}，共有{host}",
    "{rate#} tokens a second over the whole job, one step in {time} s, most of it {term*}": (
        "整个任务每秒 {rate} 个 token，一步 {time} 秒，主要花在{term}上"
    ),
    "{rate#} tokens a second over the whole job, one step in {time} s, most of it {term*}, if it fitted": (
        "假如放得下，整个任务每秒 {rate} 个 token，一步 {time} 秒，主要花在{term}上"
    ),
    "More": "更多",
    "Compare with other jobs": "与其他任务比较",
    "Batch": "批次",
    "a step": "一步",
    "an iteration": "一次迭代",
    "{n#} responses for {prompts#} prompts": "{prompts} 条提示的 {n} 个回答",
    "{n#} response for {prompts#} prompts": "{prompts} 条提示的 {n} 个回答",
    "each GPU takes {share#} of them in {n#} forwards": "每张卡分到 {share} 个，用 {n} 次前向",
    "each GPU takes {share#} of them in {n#} forward": "每张卡分到 {share} 个，用 {n} 次前向",
    "every {gpus#} GPUs take {share#} of them in {n#} forwards": "每 {gpus} 张卡分到 {share} 个，用 {n} 次前向",
    "every {gpus#} GPUs take {share#} of them in {n#} forward": "每 {gpus} 张卡分到 {share} 个，用 {n} 次前向",
    "Why {method}": "为什么用{method}",
    "{method} comes first, and {lack} where it is closest: {settings*}": (
        "{method}本应优先，但最接近的配置{lack}：{settings}"
    ),
    "{size} needed of {host*}": "需要 {size}，共有{host}",
    "{task*} recipes": "{task}配方",
    "The smallest machine that runs it: {n#} of the catalog are too small.": "能跑的最小的机器：目录中有 {n} 种太小。",
    "The least that holds it is {machine*}, where a step takes {times} times what it would if memory did not count.": (
        "放得下的最小机器是 {machine}，但每步耗时是不受显存限制时的 {times} 倍。"
    ),
    "command": "命令",
    "Copy the command": "复制命令",
    "What else could be run, and why not faster": "还能怎么跑，为什么不能更快",
    "The same on the command line: {command}": "同样的问题用命令行：{command}",
    "{verdict}: {job*}, peak {peak} of {usable} usable": "{verdict}：{job}，可用 {usable}，峰值 {peak}",
    "{n#} machines too small, now {machine}": "已有 {n} 种机器太小，正在试 {machine}",
    "{gpus} x {gpu}": "{gpus} × {gpu}",
}
# Jobs side by side.
COMPARISON = {
    "Compare": "对比",
    "Leave out": "去掉",
    "Leave out {name*}": "去掉{name}",
    "Change {name*}": "修改{name}",
    "Change": "修改",
    "Fullest GPU, and what to run": "占用最多的卡，以及该跑什么",
    "Everything the process takes of the GPU": "进程在卡上占用的全部",
    "Tokens a second, and hours, are estimates for all GPUs together; what does not fit has no hours.": (
        "每秒 token 数和小时数都是所有卡合计的估算；放不下的没有小时数。"
    ),
    "The address of this comparison": "此对比的地址",
    "Samples to train on": "训练样本数",
    "The first job on another GPU": "第一个任务换一种卡",
    "Add it": "加上",
    "A GPU hour": "每 GPU 小时",
    "As you say": "由您给出",
    "Cost": "费用",
    "Hours, times GPUs, times your price": "小时数 × 卡数 × 您的价格",
    "At that speed, each of them once": "按此速度，每个样本一遍",
    "Needed of a node": "一个节点所需",
    "{name*}: $ per GPU hour": "{name}：每 GPU 小时多少美元",
    "{jobs*}: {n#} side by side": "{jobs}：{n} 个并列",
    "Nothing that runs": "没有能运行的",
    "{n#} samples": "{n} 个样本",
    "no GPU": "没有显卡",
    "Computing {n#} of {all#} …": "正在计算第 {n} 个，共 {all} 个……",
    "{place@}: given {n#} jobs, allowed: {allowed?}": "{place}：给定 {n} 个任务，允许：{allowed}",
    "{n#} to {most#}": "{n} 到 {most}",
    "a number of $ per GPU hour, 0 or more": "每 GPU 小时的美元数，不小于 0",
    "a whole number above 0": "大于 0 的整数",
}
# Why a job died: what was read, the cause, whether message and estimate agree, the changes.
DIAGNOSIS = {
    "Diagnosis": "诊断",
    "A launch command, an error message, the end of a log, or a scenario; a file can be dropped here": (
        "启动命令、报错、日志末尾或 scenario 文件；也可以把文件拖到这里"
    ),
    "Diagnose": "诊断",
    "Clear": "清空",
    "Without JavaScript this page has this one example; the command line has every other.": (
        "没有 JavaScript 时本页只有这一个例子；其余用命令行。"
    ),
    "Read": "读到的",
    "Error": "报错",
    "Died in": "终止于",
    "Cause": "原因",
    "Message and estimate": "报错与估算",
    "Snapshot": "快照",
    "Still needed": "还缺",
    "Not computed": "未能计算",
    "How many GPUs": "几张卡",
    "choose one": "请选择",
    "Every field that was read": "读到的所有字段",
    "What was recognised": "认出的内容",
    "Trainer": "训练程序",
    "What LoRA adapts": "LoRA 作用于",
    "LoRA dropout": "LoRA dropout",
    "How the optimizer steps": "优化器的实现",
    "Gradients in": "梯度精度",
    "Activations in host memory": "激活值放主机内存",
    "Kernels": "kernel",
    "Pipeline parallel": "流水线并行",
    "Expert parallel": "专家并行",
    "Tokens a micro batch": "每个微批次的 token 数",
    "Prompts a rollout": "每次 rollout 的提示数",
    "Micro batch of the rollout": "rollout 的微批次",
    "GPUs that generate": "用于生成的卡数",
    "Expandable segments": "可扩展段",
    "Critic's model": "critic 用的模型",
    "Ask again with these": "按这些再问一次",
    "No change that was tried helps.": "试过的改动都不起作用。",
    "What is read does not make a whole job yet.": "读到的内容还不足以构成一个完整的任务。",
    "What was assumed, and what was not understood": "假设了什么，没看懂什么",
    "{verdict*}; {n#} changes that fit": "{verdict}；{n} 种改动放得下",
    "{verdict*}; {n#} change that fits": "{verdict}；{n} 种改动放得下",
    "a launch command": "启动命令",
    "an error message": "报错",
    "a traceback": "调用栈",
    "a job in words": "用文字描述的任务",
    "a scenario": "scenario",
    "a file of settings": "配置文件",
    "a Python script": "Python 脚本",
    "a memory snapshot": "显存快照",
    "a table of MemTracker": "MemTracker 的表",
    "MemTracker: {what} {size#} GiB, the estimate's {phase} {ours#} GiB": (
        "MemTracker：{what} {size} GiB，估算的{phase}阶段 {ours} GiB"
    ),
    "activations and temporary tensors": "激活值和临时张量",
    "all that is allocated": "分配的全部",
    "{place?}: given text in which nothing is recognised, allowed: {allowed?}": (
        "{place}：给定的文字中认不出任何内容，允许：{allowed}"
    ),
    "your text": "您的文字",
    "a launch command, an error message, the end of a log, or a scenario": "启动命令、报错、日志末尾或 scenario 文件",
    "{phase}, by the estimate": "{phase}，按估算",
    "{phase}, by {line!}": "{phase}，见{line}",
    "How these are counted": "这些怎样算出",
    # errors
    "The log says": "日志中的报错",
    "What is short": "缺的是",
    "What it means": "含义",
    "GPU memory": "显存",
    "host memory": "主机内存",
    "vLLM's share": "vLLM 的份额",
    "see the traceback": "看调用栈",
    "From a traceback to a phase": "从调用栈判断阶段",
    "{n#} errors of jobs that ran out of memory, and what they mean": "{n} 种显存或内存不足的报错及其含义",
    "The traceback has a function of these files": "调用栈中有这些文件的函数",
    "The innermost function that is listed decides; loading, saving and weight sync come before all others": (
        "以表中列出的最内层函数为准；加载、保存和权重同步优先于其他"
    ),
    "Weights and profiling use up vLLM's share of the card, so no room is left for its KV cache": (
        "分给 vLLM 的显存已被权重和试运行用完，没有地方放 KV 缓存"
    ),
    "vLLM's KV cache does not hold one sequence of full length": "vLLM 的 KV 缓存放不下一条满长序列",
    "When vLLM starts, other processes hold so much of the card that its share is not free": (
        "vLLM 启动时，其他进程占用的显存超过了它的份额之外所剩"
    ),
    "vLLM runs out of memory while it tries a step with the most sequences that it may run at once": (
        "vLLM 用最多的序列数试跑一步时显存用尽"
    ),
    "Weights use up SGLang's share of the card, so no room is left for its KV cache": (
        "分给 SGLang 的显存已被权重用完，没有地方放 KV 缓存"
    ),
    "/dev/shm, through which the data loader's workers pass batches, is full: give the container more of it": (
        "/dev/shm 已满，数据加载进程经它交接批次：请给容器分配更多"
    ),
    "The weights do not fit on the cards that are free, so some of them would be left in host memory": (
        "空闲的显卡放不下全部权重，一部分会留在主机内存里"
    ),
    "Ray ends workers when a node's host memory is 95 % full: what is short is host memory, not GPU memory": (
        "节点的主机内存用到 95 % 时，Ray 会终止工作进程：缺的是主机内存，不是显存"
    ),
    "An allocation in host memory failed: pinned buffers and offloaded states need more than the node has": (
        "主机内存分配失败：锁页缓冲区和卸载的状态所需超过节点所有"
    ),
    "Evaluation keeps the logits of its whole data set on the card: set eval_accumulation_steps, or reduce them by "
    "preprocess_logits_for_metrics": (
        "评估把整个数据集的 logits 留在卡上：设置 eval_accumulation_steps，或用 preprocess_logits_for_metrics 缩减"
    ),
    "PyTorch's allocator found no room on the card": "PyTorch 的分配器在卡上找不到空间",
    "NCCL allocates outside PyTorch's allocator and found the card full": (
        "NCCL 在 PyTorch 的分配器之外分配显存，卡已满"
    ),
    "cuBLAS found no room for its workspace: PyTorch holds all of the card": (
        "cuBLAS 的工作区没有空间：PyTorch 占满了整张卡"
    ),
    "The driver found the card full; another process may hold it": "驱动发现卡已满；可能被其他进程占用",
    "The card is full": "卡已满",
    "The kernel killed the process, as it does when host memory runs out": "内核终止了进程，主机内存用尽时就会如此",
    "The text says that host memory ran out": "文中说主机内存用尽",
    "The text says that the card's memory ran out": "文中说显存用尽",
    # the cause
    "In {phase}, at its peak ({moment*}), each GPU of {group} takes {size!} of {limit!}: {lines*}": (
        "{phase}阶段的显存峰值时刻（{moment}），{group} 的每张卡需要 {size}，可用 {limit}：{lines}"
    ),
    "In {phase}, at its peak ({moment*}), each GPU of {group} takes {size!} of {limit!}": (
        "{phase}阶段的显存峰值时刻（{moment}），{group} 的每张卡需要 {size}，可用 {limit}"
    ),
    "In {phase}, at its peak ({moment*}), each GPU takes {size!} of {limit!}: {lines*}": (
        "{phase}阶段的显存峰值时刻（{moment}），每张卡需要 {size}，可用 {limit}：{lines}"
    ),
    "In {phase}, at its peak ({moment*}), each GPU takes {size!} of {limit!}": (
        "{phase}阶段的显存峰值时刻（{moment}），每张卡需要 {size}，可用 {limit}"
    ),
    "Host memory, {phase}: {size!} a node of {limit!}; {lines*}": (
        "主机内存，{phase}：每节点 {size}，共有 {limit}；{lines}"
    ),
    "{what} {n#} GiB": "{what} {n} GiB",
    "{what} {n#} GB": "{what} {n} GB",
    "{what} {n#} MiB": "{what} {n} MiB",
    "{what} of the {role}": "{role}的{what}",
    "the weights": "权重",
    "the rotary tables": "旋转位置表",
    "the fp32 master weights": "fp32 主权重",
    "the gradients": "梯度",
    "the optimizer's states": "优化器状态",
    "the activations": "激活值",
    "the checkpointed layer inputs": "重计算所存的层输入",
    "the KV cache": "KV 缓存",
    "the buffers for communication": "通信缓冲区",
    "temporary tensors": "临时张量",
    "the adapters": "适配器",
    "CUDA graphs of vLLM": "vLLM 的 CUDA 图",
    "cuBLAS's workspace": "cuBLAS 的工作区",
    "the checkpoint": "检查点",
    "{one*} + {other*}": "{one} + {other}",
    "the CUDA context": "CUDA 上下文",
    "the logits of {tokens#} tokens over {vocab#} words": "{tokens} 个 token 对 {vocab} 个词的 logits",
    # message and estimate
    "host memory: {size!} needed of {limit!}; the estimate agrees": "主机内存：需要 {size}，共有 {limit}；与估算一致",
    "host memory: {size!} needed of {limit!}; the estimate finds that enough: other processes, page cache in /dev/shm, "
    "or less memory than assumed": (
        "主机内存：需要 {size}，共有 {limit}；估算认为够用：可能有其他进程、/dev/shm 中的页缓存，或内存比假设的少"
    ),
    "host memory: {size!} needed of {limit!}; the estimate finds that enough: other processes, or page cache in "
    "/dev/shm": "主机内存：需要 {size}，共有 {limit}；估算认为够用：可能有其他进程，或 /dev/shm 中的页缓存",
    "the node: {used!} of {limit!} were in use when Ray ended a worker (what Ray prints as GB are GiB)": (
        "该节点：Ray 终止进程时，{limit} 中已用 {used}（Ray 显示的 GB 实为 GiB）"
    ),
    "the estimate says that this job fits, with probability {p#}: then something differs, such as other processes on "
    "the card, longer data than the caps say, another release, an evaluation step, or fragmentation": (
        "估算认为这个任务放得下，概率 {p}：那么必有不同之处，例如卡上有其他进程、"
        "数据比上限长、版本不同、评测步骤，或碎片"
    ),
    "phase: the traceback died in {told}, and so does the estimate": "阶段：调用栈终止于{told}，估算也是",
    "phase: the traceback died in {told}; by the estimate {first} fails first, and {again} would, too": (
        "阶段：调用栈终止于{told}；按估算先失败的是{first}，{again}也会失败"
    ),
    "phase: the traceback died in {told}, the estimate in {first}: a setting differs from what was assumed, or data "
    "was shorter than its cap until then": (
        "阶段：调用栈终止于{told}，估算在{first}：某项设置与假设不同，或者此前的数据没有到上限"
    ),
    "card: the message has {size!}, the GPU assumed {other!}: name the right GPU": (
        "显卡：报错中为 {size}，所假设的卡为 {other}：请指明正确的显卡"
    ),
    "allocated: {size!} and {more!} asked for, the estimate's {phase} {ours!}: {told}": (
        "已分配 {size}，又要 {more}；估算的{phase}阶段为 {ours}：{told}"
    ),
    "allocated: {size!} and {more!} asked for, the estimate's {phase} {ours!}: it holds more: longer data, another "
    "setting, or memory that is not given back": (
        "已分配 {size}，又要 {more}；估算的{phase}阶段为 {ours}：实际更多：数据更长、设置不同，或有未归还的显存"
    ),
    "agrees": "一致",
    "the job needs more than that later on": "任务后面还需要更多",
    "fragmentation: {size!} are reserved but unallocated, more than the {asked!} asked for: expandable_segments:True "
    "makes them usable": ("碎片：{size} 已保留但未分配，多于所要的 {asked}：expandable_segments:True 能让它们可用"),
    "other processes hold {size!} of the card, which no change of this job frees": (
        "其他进程占用了这张卡的 {size}，改动这个任务不能释放它"
    ),
    "{size!} of the card belong to no process that the message lists: another container, or the driver": (
        "卡上有 {size} 不属于报错中列出的任何一方：别的容器，或驱动"
    ),
    # questions
    "Which model is trained? {why*}": "训练哪个模型？{why}",
    "Which model is trained?": "训练哪个模型？",
    "Which GPU?": "哪种显卡？",
    "${name!} is not set in the text": "文中没有设定 ${name}",
    "model {name!} is not in the catalog": "目录中没有模型 {name}",
    "model {name!} is not in the catalog; did you mean {near!}?": "目录中没有模型 {name}；是不是想写 {near}？",
    # what was assumed
    "{name@} {value!}: the default of {release!}": "{name} {value}：{release} 的默认值",
    "{name@} {value!}: the default of plain PyTorch": "{name} {value}：纯 PyTorch 的默认值",
    "{name@} {value!}: plain Transformers' default": "{name} {value}：Transformers 的默认值",
    "{name@} {value!}: host memory ran out, and the cards would not hold it": (
        "{name} {value}：主机内存用尽，而显卡放不下它"
    ),
    "{name@} {value!}: what Unsloth patches and loads by default": "{name} {value}：Unsloth 默认修补和加载的",
    "{name@} {value!}: the error is vLLM's": "{name} {value}：报错来自 vLLM",
    "{name@} {value!}: Ray's message states it": "{name} {value}：Ray 的报错中写明",
    "{name@} {value!}: the error states it": "{name} {value}：报错中写明",
    "{name@} {value!}: one GPU unless said": "{name} {value}：未说明时按一张卡",
    "{name@} {value!}: the newest release with flags of this age": "{name} {value}：有这些参数的最新版本",
    "{name@} {value!}: the text names it": "{name} {value}：文中提到",
    "{name@} {value!}: nothing says what is trained": "{name} {value}：没有说明训练什么",
    "{name@} {value!}: the shape that {given!} is named after": "{name} {value}：{given} 由它得名，形状相同",
    "{name@} {value!}: the card that the text names": "{name} {value}：文中提到的卡",
    "{name@} {value!}: the card whose memory the message states": "{name} {value}：报错所示显存大小的卡",
    "{name@} {value!}: the message's total is that of {cards!}: the memory is theirs, speed may differ": (
        "{name} {value}：报错中的总显存与 {cards} 相同：显存一致，速度可能不同"
    ),
    "{name@} {value!}: rank or card {n#} appears, so there are at least {least#}": (
        "{name} {value}：出现了第 {n} 号进程或卡，所以至少有 {least} 张"
    ),
    "it died in evaluation, which is not computed: that takes per_device_eval_batch_size sequences at once, 8 in "
    "Transformers unless set": (
        "任务死于评估，评估未计入估算：它一次处理 per_device_eval_batch_size 条序列，Transformers 默认 8 条"
    ),
    "framework {name!}: its files are in the traceback": "framework {name}：调用栈中有它的文件",
    "{place@}: {given!} is not in the catalog; taken to be the policy's": (
        "{place}：目录中没有 {given}；按与策略模型相同"
    ),
    "{place@}: {given!} is not in the catalog; did you mean {near!}?; taken to be the policy's": (
        "{place}：目录中没有 {given}；是不是想写 {near}？按与策略模型相同"
    ),
    "left out: {line?}": "略去：{line}",
    "not understood: {name!}": "没看懂：{name}",
    "not said: {name!}, as ${variable!} is not set in the text": "不清楚：{name}，因为文中没有设定 ${variable}",
    # remedies
    "Remedies computed for this job: what to change, the best first": "为这个任务算出的办法：改什么，最好的在前",
    "Remedies computed for this job: what frees memory where it died, the best first": (
        "为这个任务算出的办法：什么能在它终止的地方腾出显存，最好的在前"
    ),
    "Each row is the job with that change alone, estimated as a whole; time is that of one step.": (
        "每一行是只做该项改动的任务，整体估算；时间为一步的时间。"
    ),
    "Change, and how the command says it": "改动，以及命令中的写法",
    "Peak before": "之前的峰值",
    "Peak after": "之后的峰值",
    "A step takes": "一步的时间",
    "Changes for the training": "对训练的影响",
    "what is learned": "改变所学",
    "numerics only": "仅数值精度",
    "{percent#} % longer": "长 {percent} %",
    "{percent#} % less": "短 {percent} %",
    "{n#} times as long": "{n} 倍",
    "fewer tokens in a batch": "每批更少 token",
    "smaller micro batch": "更小的微批次",
    "smaller micro batch in scoring": "打分时更小的微批次",
    "ZeRO stage {n#}": "ZeRO 阶段 {n}",
    "offload the optimizer": "卸载优化器",
    "offload weights and optimizer": "卸载权重和优化器",
    "offload the {role} model": "卸载{role}",
    "fused or chunked loss": "融合或分块的损失",
    "a smaller share for vLLM": "给 vLLM 更小的份额",
    "a larger share for vLLM": "给 vLLM 更大的份额",
    "let vLLM sleep while others work": "别的角色工作时让 vLLM 休眠",
    "a shorter context for vLLM": "给 vLLM 更短的上下文",
    "more GPUs for each engine of vLLM": "每个 vLLM 引擎用更多卡",
    "GPUs of its own for vLLM": "给 vLLM 单独的卡",
    "all roles on all GPUs, vLLM asleep between": "所有角色共用全部显卡，vLLM 间歇休眠",
    "bf16 weights and states": "bf16 权重和状态",
    "shorter responses": "更短的回答",
    "shorter sequences": "更短的序列",
    "more GPUs": "更多显卡",
    "weights stay on the GPU": "权重留在显卡上",
    "nothing is offloaded": "什么都不卸载",
    "nothing is offloaded, ZeRO stage {n#}": "什么都不卸载，ZeRO 阶段 {n}",
    "the {role} model stays on the GPU": "{role}留在显卡上",
    "vLLM does not sleep": "vLLM 不休眠",
    "more host memory": "更多主机内存",
    "the configuration that recommend finds": "recommend 找到的配置",
}
# What scripts say.
SCRIPTS = {
    "Loading the calculator: Python and the formulas, {megabytes} MB, once …": (
        "正在加载计算器：Python 和公式，{megabytes} MB，只需一次……"
    ),
    "Computing …": "正在计算……",
    "The calculator could not be loaded: check the connection and ask again. The tables below need nothing.": (
        "计算器无法加载：请检查网络后再试。下面的表格不受影响。"
    ),
    "This question hit a bug in the calculator: change a field and ask again, or use python -m calc. The browser's "
    "console has the details for a bug report.": (
        "计算器自身出错，答不了这个问题：请改一个字段再试，或用 python -m calc。"
        "浏览器控制台记有详情，可附在错误报告里。"
    ),
    "The calculator works on the site, not from a folder; the tables of the pages work everywhere.": (
        "计算器只能在网站上使用，不能从文件夹打开；各页的表格到处都能用。"
    ),
    "Stopped.": "已停止。",
    "memory snapshot: {file}": "显存快照：{file}",
    "Back to the comparison, with this job": "带着这个任务回到比较",
    "Also in this job:": "此任务还有：",
    "Leave out {field}": "去掉 {field}",
    "Copied": "已复制",
    "Provisional: {line}. PyTorch's allocator is being replayed …": "暂定：{line}。正在重放 PyTorch 的分配器……",
    "{line}. Other configurations are being compared …": "{line}。正在与其他配置比较……",
    "Not allowed here": "此处不允许",
    "Not copied": "未能复制",
    "Not found": "未找到",
    "Download or copy": "下载或复制",
    "Copy as ": "复制为 ",
    "Copy the line": "复制引文",
    "Copy BibTeX": "复制 BibTeX",
    "Show the working": "查看计算过程",
    "Then choose a number": "然后点一个数字",
    "Bytes": "字节",
    "Values put in": "代入的数值",
    "Together": "合计",
    "Close": "关闭",
    "outside PyTorch's allocator": "不计入 PyTorch 分配器",
    "Of “{table}”, at {moment}. Catalog {catalog}, calc {calc}.": "“{table}”，{moment}。目录 {catalog}，calc {calc}。",
    "The job, as {command} reads it": "任务，可交给 {command}",
}
# A line about input that cannot be used: place, what was given, what is allowed, and why.
REFUSALS = {
    "{line?}; did you mean {near!}?": "{line}；是不是想写 {near}？",
    "{place@}: given {given!}, allowed: {allowed?}": "{place}：给定 {given}，允许：{allowed}",
    "{place@}: given {given!}, but {why*}; allowed: {allowed?}": "{place}：给定 {given}，但{why}；允许：{allowed}",
    "Apple's GPUs are not modelled, which share the memory of the whole Mac": (
        " Apple 的 GPU 不在计算范围内，它们与整台 Mac 共用内存"
    ),
    "{place@}: given {given!}, which {why*}; allowed: {allowed?}": "{place}：给定 {given}，它{why}；允许：{allowed}",
    "{place@}: given {given!}, not {original!}: its weights are stored as {form!}, which is not modelled; "
    "allowed: {allowed?}": (
        "{place}：给定 {given}，不是 {original}：它的权重以 {form} 存储，不在计算范围内；允许：{allowed}"
    ),
    "another model; did you mean {near!}?": "别的模型；是不是想写 {near}？",
    # what is not modelled of a model that no file describes
    "reads images, and its vision tower is not modelled; those of qwen3-vl-8b and gemma-3-12b are": (
        "会读图像，其视觉塔不在计算范围内；可计算的有 qwen3-vl-8b 和 gemma-3-12b"
    ),
    "reads images, and its vision tower is not modelled; glm-4.1v-9b is of a later kind": (
        "会读图像，其视觉塔不在计算范围内；glm-4.1v-9b 是它的后继"
    ),
    "reads images, and its layers are not those of the Mistral models that are modelled, such as {id!}": (
        "会读图像，它的层也不同于可计算的 Mistral 模型，例如 {id}"
    ),
    "runs its layers several times over, which is not modelled; smollm3-3b is of like size": (
        "会把各层循环运行多遍，不在计算范围内；大小相近的有 smollm3-3b"
    ),
    "hears or speaks, which is not modelled; qwen2.5-omni-7b and qwen2-audio-7b are, without sound": (
        "处理语音，不在计算范围内；可计算不用语音的 qwen2.5-omni-7b 和 qwen2-audio-7b"
    ),
    "has attention of a kind that is not modelled; {id!} is the nearest": ("的注意力不在计算范围内；最接近的是 {id}"),
    "has attention of a kind that is not modelled; qwen3-8b is of like size": (
        "的注意力不在计算范围内；大小相近的有 qwen3-8b"
    ),
    "is of an architecture that few train today, and that is not modelled; gpt2, gpt-neox-20b and mixtral-8x7b are": (
        "的架构如今很少有人训练，不在计算范围内；可计算的有 gpt2、gpt-neox-20b 和 mixtral-8x7b"
    ),
    "is of a BailingMoE that is not modelled; ling-lite-1.5, ling-mini-2.0, ling-flash-2.0 and ling-1t are": (
        "属于不在计算范围内的 BailingMoE；可计算的有 ling-lite-1.5、ling-mini-2.0、ling-flash-2.0 和 ling-1t"
    ),
    "has a state space or recurrence of another kind than nemotron-nano-9b-v2's and qwen3-next-80b-a3b's, which are "
    "modelled": "的状态空间或循环结构不同于可计算的 nemotron-nano-9b-v2 和 qwen3-next-80b-a3b",
    "slopes attention's scores by position (ALiBi) in code that lies beside its weights; bloom-7b1 and mpt-7b do so, "
    "too": "用 ALiBi 位置编码，代码随权重发布；同样用 ALiBi 的有 bloom-7b1 和 mpt-7b",
    "has lightning attention in most layers, which is not modelled; ling-flash-2.0 and ling-1t are the nearest": (
        "的大多数层使用 lightning attention，不在计算范围内；最接近的是 ling-flash-2.0 和 ling-1t"
    ),
    "has layers of a kind that is not modelled; deepseek-v3.2 and minimax-m2 are large MoE models that are": (
        "的层不在计算范围内；可计算的大型 MoE 模型有 deepseek-v3.2 和 minimax-m2"
    ),
    "has layers of a kind that is not modelled; minimax-m2 is of like size": (
        "的层不在计算范围内；大小相近的有 minimax-m2"
    ),
    "has attention by blocks, whose code lies beside its weights; phi-3-medium is modelled": (
        "的注意力按块计算，代码随权重发布；可计算的有 phi-3-medium"
    ),
    "has weights of three values, which are not modelled; qwen2.5-1.5b is of like size": (
        "的权重只有三种取值，不在计算范围内；大小相近的有 qwen2.5-1.5b"
    ),
    "has a gated delta rule of a kind of its own, which is not modelled; qwen3.5-9b has another": (
        "的 gated delta rule 与众不同，不在计算范围内；qwen3.5-9b 用的是另一种"
    ),
    "is of a family whose code lies beside its weights; qwen3-8b, qwen3-32b and qwen3-30b-a3b are modelled": (
        "所属系列的代码随权重发布；可计算的有 qwen3-8b、qwen3-32b 和 qwen3-30b-a3b"
    ),
    "is of the family of {id!}, but no file of the catalog describes it": ("与 {id} 同族，但目录中没有它的文件"),
    "has two attentions in a layer and experts that do nothing, which are not modelled; deepseek-v3 has neither, and "
    "is": "一层里有两个注意力，还有什么都不做的专家，二者都不在计算范围内；deepseek-v3 没有这些，可以计算",
    "slopes attention's scores by position (ALiBi) in layers that are not modelled; falcon-7b, bloom-1b1 and mpt-7b "
    "are": "按位置倾斜注意力分数 (ALiBi)，其层不在计算范围内；可计算的有 falcon-7b、bloom-1b1 和 mpt-7b",
    "is of SlimMoE, whose code lies beside its weights; phi-3.5-moe is of like build": (
        "属于 SlimMoE，代码随权重发布；结构相近的是 phi-3.5-moe"
    ),
    "has linears in place of some attention, which is not modelled; nemotron-super-49b is of like build": (
        "有些层以线性层代替注意力，这不在计算范围内；nemotron-super-49b 结构相近"
    ),
    "has an encoder beside its decoder, which is not modelled; decoders of every size are, from qwen3-0.6b on": (
        "除解码器外还有编码器，不在计算范围内；可计算各种规模的解码器，从 qwen3-0.6b 起"
    ),
    "is an encoder, which is not modelled; qwen3-reranker-0.6b is a decoder that scores texts, and is": (
        "是编码器，不在计算范围内；可计算的有给文本打分的解码器 qwen3-reranker-0.6b"
    ),
    "makes text by diffusion, which is not modelled; llama-3-8b and qwen2.5-7b are of like size": (
        "用扩散生成文本，不在计算范围内；规模相近的有 llama-3-8b 和 qwen2.5-7b"
    ),
    "makes images, which is no job of this guide": "生成图像，不是本指南的任务",
    "Intel's GPUs are not modelled, where PyTorch has another allocator (torch.xpu)": (
        " Intel 的 GPU 不在计算范围内，PyTorch 在那里用另一个分配器（torch.xpu）"
    ),
    "Intel's Gaudi is not modelled, where a compiler of graphs plans the memory": (
        " Intel 的 Gaudi 不在计算范围内，那里由图编译器规划内存"
    ),
    "Jetson modules are not modelled, which share the board's memory and take NVIDIA's own builds of PyTorch": (
        " Jetson 模块不在计算范围内，它们与整块板共用内存，用的是 NVIDIA 自己构建的 PyTorch"
    ),
    "TPUs are not modelled, where XLA plans the memory": " TPU 不在计算范围内，那里由 XLA 规划内存",
    "a job without a GPU is not modelled": "没有 GPU 的任务不在计算范围内",
    "{place@}: given {given!}, allowed with {release!}: {allowed?}": "{place}：给定 {given}，{release} 允许：{allowed}",
    "{place@}: given {given!}, allowed for {what!}: {allowed?}": "{place}：给定 {given}，{what} 允许：{allowed}",
    "none; a function scores": "none；由函数打分",
    "with precision bf16 and one of the shardings {names!}": "precision 为 bf16，sharding 为 {names} 之一",
    "{name!}, which framework names": "{name}，即 framework 所写的",
    "{place@}: given {given!}, allowed with {release!} for {task!}: {allowed?}": (
        "{place}：给定 {given}，{release} 的 {task} 允许：{allowed}"
    ),
    "{place@}: given {given!}, allowed with openrlhf, which trains on DeepSpeed: {allowed?}": (
        "{place}：给定 {given}，openrlhf 用 DeepSpeed 训练，允许：{allowed}"
    ),
    "{place@}: given {given!} on {n} GPUs, allowed with {release!}: {allowed?}": (
        "{place}：在 {n} 张卡上给定 {given}，{release} 允许：{allowed}"
    ),
    "{place@}: given for a role of the trainer, allowed with {release!}: {allowed?}": (
        "{place}：为训练中的角色给定，{release} 允许：{allowed}"
    ),
    "{place@}: given for a role that is not trained, allowed: {allowed?}": (
        "{place}：为不训练的角色给定，允许：{allowed}"
    ),
    "{place@}: given {given!} for the family {family!}, allowed: {allowed?}": (
        "{place}：{family} 系列给定 {given}，允许：{allowed}"
    ),
    "{place@}: given {given!} on {card!}, allowed: {allowed?}": "{place}：在 {card} 上给定 {given}，允许：{allowed}",
    "{place@}: given {given!}, allowed for the family {family!}: {allowed?}": (
        "{place}：给定 {given}，{family} 系列允许：{allowed}"
    ),
    "pretrain; its registry has one configuration for chats, of Qwen3 8B, and another would be code of your own": (
        "pretrain；它的注册表只有一个对话数据的配置（Qwen3 8B），其他配置要自己写代码"
    ),
    "{place@}: given {given!}, allowed for a command of {framework!}: {allowed?}": (
        "{place}：给定 {given}，{framework} 的命令允许：{allowed}"
    ),
    "FlashAttention-2 does not run on it, and {release!} takes only {field!} {value!}": (
        " FlashAttention-2 不能在它上面运行，而 {release} 只支持 {field} {value}"
    ),
    "it has no bf16, and {release!} takes only {field!} {value!}": ("它没有 bf16，而 {release} 只支持 {field} {value}"),
    "a card from Ampere on": "Ampere 或更新的卡",
    "{place@}: given {given!} with {other!}, allowed: {allowed?}": (
        "{place}：在 {other} 下给定 {given}，允许：{allowed}"
    ),
    "{place@}: given {given!} with {other!}, allowed with {release!}: {allowed?}": (
        "{place}：在 {other} 下给定 {given}，{release} 允许：{allowed}"
    ),
    "{place@}: given {given!} for {task!}, allowed: {allowed?}": "{place}：为 {task} 给定 {given}，允许：{allowed}",
    "{place@}: given {given!} for {task!}, allowed with {release!}: {allowed?}": (
        "{place}：为 {task} 给定 {given}，{release} 允许：{allowed}"
    ),
    "{place@}: given with {other!}, allowed: {allowed?}": "{place}：在 {other} 下给定，允许：{allowed}",
    "{place@}: given with {other!}, which has no adapters, allowed: {allowed?}": (
        "{place}：在 {other} 下给定，而它没有适配器，允许：{allowed}"
    ),
    "{place@}: given with method lora, allowed: none, or {} for the actor without its adapters": (
        "{place}：在 method lora 下给定，允许：none，或用 {} 表示关掉适配器的 actor"
    ),
    "{place@}: given for {task!}, allowed: {allowed?}": "{place}：为 {task} 给定，允许：{allowed}",
    "{place@}: given {given!} where GPUs share sequences, allowed: {allowed?}": (
        "{place}：在多卡共用序列时给定 {given}，允许：{allowed}"
    ),
    "{place@}: given for a model without a vision tower, allowed: with one, such as {model!}": (
        "{place}：该模型没有视觉塔，允许：有视觉塔的模型，例如 {model}"
    ),
    "{place@}: given for a model whose part for images is not modelled, allowed: with one, such as {model!}": (
        "{place}：该模型读图像的部分不在计算范围内，允许：有视觉塔的模型，例如 {model}"
    ),
    "{place@}: given {given!}, allowed: at least the {tokens!} tokens of a sample's images": (
        "{place}：给定 {given}，允许：不小于每条样本的图片所占的 {tokens} 个 token"
    ),
    "{place@}: given {given!}, allowed: nothing; every image is resized to {edge!} pixels a side": (
        "{place}：给定 {given}，允许：不给；每张图片都缩放为边长 {edge} 像素"
    ),
    "{place@}: given {given!} with images, allowed: {allowed?}; the tower's scores are not modelled": (
        "{place}：有图片时给定 {given}，允许：{allowed}；没有模拟视觉塔的注意力分数"
    ),
    "{place@}: given {given!}, not modelled yet, allowed: {allowed?}": (
        "{place}：给定 {given}，尚未模拟，允许：{allowed}"
    ),
    "{place@}: given {given!}, which has no command, allowed: {allowed?}": (
        "{place}：给定 {given}，它没有命令，允许：{allowed}"
    ),
    "{place@}: given {given!}, whose flags differ, allowed: {allowed?}": (
        "{place}：给定 {given}，它的参数不同，允许：{allowed}"
    ),
    "{place@}: given {given!}, whose transformers {version!} lacks {kind!}, which came with {first!}, allowed: "
    "{allowed?}": (
        "{place}：给定 {given}，它的 transformers {version} 没有 {kind}，后者自 {first} 起才有，允许：{allowed}"
    ),
    "{place@}: given {given!}, which lacks {kind!}, allowed: {allowed?}": (
        "{place}：给定 {given}，其中没有 {kind}，允许：{allowed}"
    ),
    "{place@}: given {given!} GPUs for {parts!}, allowed: GPUs of roles and rollout that add up to gpus = {total}": (
        "{place}：给 {parts} 的是 {given} 张卡，允许：各角色与 rollout 的卡数之和等于 gpus = {total}"
    ),
    "{place@}: given none with placement 'separate', allowed: GPUs of its own, as no role runs whose GPUs it could "
    "share": "{place}：placement 为 'separate' 而没有给定，允许：自己的卡，因为没有可与之共用显卡的角色",
    "{place@}: given {given!} beside a trainer on {nodes} of {all} nodes, allowed for a command of "
    "trl: at most {most}, "
    "on a node without the trainer": (
        "{place}：训练占用 {all} 个节点中的 {nodes} 个，此外给定 {given}，trl 的命令允许：至多 {most}，"
        "在没有训练的节点上"
    ),
    "{place@}: given where {others!} shares the actor's GPUs, allowed with openrlhf: none, as one flag puts all roles "
    "there": "{place}：{others} 与 actor 共用显卡时给定，openrlhf 允许：不给，因为一个参数把所有角色放在一起",
    "{place@}: given twice, allowed: once": "{place}：给定了两次，允许：一次",
    "{place@}: given nothing, allowed: {allowed?}": "{place}：什么都没有给，允许：{allowed}",
    "{place@}: given the name {given!}, allowed: text": "{place}：给定的名称是 {given}，允许：文本",
    "{place@}: given the tag {given!}, allowed: values without tags": "{place}：给定标签 {given}，允许：不带标签的值",
    "{place@}: given the alias {given!}, allowed: one that is complete above it": (
        "{place}：给定别名 {given}，允许：在它之前已经完整的别名"
    ),
    "{place@}: given {n#} characters, allowed: at most {most#}": "{place}：有 {n} 个字符，允许：至多 {most} 个",
    "{place@}: given more than {n#} bytes, allowed: no more": "{place}：超过 {n} 字节，允许：不超过",
    "{place@}: given more than {n#} values, allowed: no more": "{place}：超过 {n} 个值，允许：不超过",
    "{place@}: given an integer of more than {n#} digits, allowed: a shorter one": (
        "{place}：给定的整数超过 {n} 位，允许：短一些的"
    ),
    "{place@}: given a number that is not finite, allowed: a finite number": (
        "{place}：给定的数不是有限数，允许：有限数"
    ),
    "{place@}: nested too deeply, allowed: at most {n#} levels": "{place}：嵌套太深，允许：至多 {n} 层",
    "{place@}: unknown field {field!}, allowed: {allowed?}": "{place}：没有字段 {field}，允许：{allowed}",
    "{place@}: unknown field {field!}": "{place}：没有字段 {field}",
    "{place@}: missing field {field!}": "{place}：缺少字段 {field}",
    "missing field {field!}": "缺少字段 {field}",
    "{place@}: field {field!} given twice": "{place}：字段 {field} 给定了两次",
    "{place@}: not YAML: {problem?}": "{place}：不是 YAML：{problem}",
    "{place@}: not JSON: {problem?}": "{place}：不是 JSON：{problem}",
    "expected a single document, but found another one": "应当只有一个文档，却还有一个",
    "{place@}: not a role of {task!}, allowed: {allowed?}": "{place}：不是 {task} 的角色，允许：{allowed}",
    "{place@}: a field's name must be text": "{place}：字段名必须是文本",
    "{line?}: other fields may follow from it": "{line}：其他字段可能由它决定",
    "nothing given": "没有给定",
    "{place@}: given {given!} on {n} GPUs, allowed for a command of {framework!}: {allowed?}": (
        "{place}：在 {n} 张卡上给定 {given}，{framework} 的命令允许：{allowed}"
    ),
    "{place@}: given {given!} without Ray, allowed: {allowed?}": "{place}：没有 Ray 时给定 {given}，允许：{allowed}",
    "{place@}: given counts and more, allowed: {allowed?}": "{place}：除 counts 外还给了别的，允许：{allowed}",
    "{place@}: given data and more, allowed: {allowed?}": "{place}：除 data 外还给了别的，允许：{allowed}",
    "{place@}: given {given!} with method {method!}, allowed for a command of {framework!}: {allowed?}": (
        "{place}：在 method {method} 下给定 {given}，{framework} 的命令允许：{allowed}"
    ),
    "with DeepSpeed, or bf16, fp32": "在 DeepSpeed 下，或用 bf16、fp32",
    "one of them": "只给其中一个",
    "for tasks without a rollout; {task} has expected_len": "用于没有 rollout 的任务；{task} 用 expected_len",
    "a list of names": "名称的列表",
    "products of attention, with or without all three of the MLP, and the head": (
        "注意力的各个乘积，可加上 MLP 的全部三个以及输出头"
    ),
    "on one": "一张卡",
    "own; modelled for {tasks!}": "own；只模拟了 {tasks}",
    "chunked, as its configurations": "chunked，与它的配置一致",
    "native, or with loss fused and trainer megatron, megatron-swift": (
        "native，或在 trainer megatron、megatron-swift 下与 loss fused 一起"
    ),
    "p2p, all_gather, or heads of queries and keys that {n} GPUs share": (
        "p2p、all_gather，或能由 {n} 张卡平分的查询头和键头"
    ),
    "no_shard, or with megatron": "no_shard，或用 megatron",
    "p2p, or with context_parallel under Megatron-core": "p2p，或在 Megatron-core 下与 context_parallel 一起",
    "mean and longest, data, or counts": "mean 和 longest，或 data，或 counts",
    "counts alone, data alone, or mean and longest": "只给 counts，或只给 data，或者 mean 和 longest",
    "one of {n} known data sets, or mean and longest": "{n} 个已知数据集之一，或者 mean 和 longest",
    "a positive number behind '#'": "“#” 后面是正整数",
    "bf16, fp16, or mixed with DeepSpeed; a frozen base is loaded in 16 bits": (
        "bf16、fp16，或在 DeepSpeed 下用 mixed；冻结的基座以 16 位加载"
    ),
    "{place@}: given {given!}, {name!}; allowed: {allowed?}": "{place}：给定 {given}，即 {name}；允许：{allowed}",
    "a path to its config.json, or another model": "它的 config.json 的路径，或别的模型",
    # what is allowed
    "a mapping of fields": "字段的映射",
    "a mapping of fields, or a list of them": "字段的映射，或其列表",
    "true or false": "true 或 false",
    "a number": "一个数",
    "an integer": "一个整数",
    "a number of at least {n}": "不小于 {n} 的数",
    "an integer of at least {n}": "不小于 {n} 的整数",
    "a number above {n}": "大于 {n} 的数",
    "a number above {n} and of at most {most}": "大于 {n}、不大于 {most} 的数",
    "a number above {n} and below {most}": "大于 {n}、小于 {most} 的数",
    "a number of at least {n} and below {most}": "不小于 {n}、小于 {most} 的数",
    "a number of at least {n} and of at most {most}": "不小于 {n}、不大于 {most} 的数",
    "an integer of at least {n} and of at most {most}": "不小于 {n}、不大于 {most} 的整数",
    "{one!} or null": "{one} 或 null",
    "{one!} or a list{rest!}": "{one} 或列表{rest}",
    "text": "文本",
    "text that is not empty": "非空文本",
    "text such as {example!}": "文本，如 {example}",
    "text that matches {pattern!}": "符合 {pattern} 的文本",
    "a positive integer": "正整数",
    "an integer, 0 or more": "不小于 0 的整数",
    "a number, 0 or more, or null": "不小于 0 的数，或 null",
    "a number above 0, at most 1": "大于 0、不大于 1 的数",
    "a number that fills whole nodes": "能占满整数个节点的数",
    "an id that {command!} lists": "{command} 列出的 id",
    "an id that {command!} lists, a Hugging Face name among theirs, or a path to a config.json": (
        "{command} 列出的 id、其中的 Hugging Face 名称，或 config.json 的路径"
    ),
    "{ids!}, a Hugging Face name among theirs, or a path to a config.json": (
        "{ids}、其中的 Hugging Face 名称，或 config.json 的路径"
    ),
    "{names!}, each with ==version": "{names}，都可带 ==版本",
    "a version of numbers, such as {name!}": "由数字组成的版本，如 {name}",
    "a multiple of {what!}, as {near!}": "{what} 的倍数，如 {near}",
    "with rollout.n = {n} a multiple of {ranks}": "rollout.n = {n} 时为 {ranks} 的倍数",
    "a multiple of {n} GPUs": "{n} 张卡的倍数",
    "a multiple of tensor_parallel = {n}": "tensor_parallel = {n} 的倍数",
    "{one#} or {other#}": "{one} 或 {other}",
    "at most {what!}": "至多 {what}",
    "at least {what!}": "至少 {what}",
    "at least {n}, a micro batch of {scored} for each of the actor's {gpus} GPUs": (
        "至少 {n}，即 actor 的 {gpus} 张卡各一个 {scored} 的微批次"
    ),
    "at least {n} in a group": "一组至少 {n} 个",
    "2 or more in a group": "一组 2 个或更多",
    "at most the model's window of {n}": "至多为模型的窗口 {n}",
    "a divisor of {what!}": "{what} 的约数",
    "a divisor of {n}, a square's patches in a row": "正方形每行 {n} 个图块的约数",
    "a divisor of {n} below it: the GPUs that can share one model's shards": "小于 {n} 的约数：共同持有一个模型的卡",
    "{n}, which the linears around it have; others are not modelled": "{n}，即前后线性层的宽度；其他不在计算范围内",
    "0.25, 0.5 or 1": "0.25、0.5 或 1",
    "{n}; others are not modelled": "{n}；其他不在计算范围内",
    "a list of two numbers": "含两个数的列表",
    "a mapping, the part that hears, or null": "映射，即听觉部分，或 null",
    "a number from -1 to {most!}, or a list of such numbers": "-1 到 {most} 的数，或由这样的数组成的列表",
    "a list of heights and widths, in multiples of {n}": "高与宽的列表，均为 {n} 的倍数",
    "anyres_max_N, such as anyres_max_9": "anyres_max_N，如 anyres_max_9",
    "an even number: a gate and as much that it weighs": "偶数：门控与同宽的被加权部分",
    "{tower!}; other towers are not modelled": "{tower}；其他视觉塔不在计算范围内",
    "a divisor or multiple of {n} key/value heads": "{n} 个键值头的约数或倍数",
    "a divisor of the model's {n} attention heads": "模型 {n} 个注意力头的约数",
    "a divisor of the rollout's {n} GPUs": "rollout 的 {n} 张卡的约数",
    "a divisor of the actor's {n}": "actor 的 {n} 张卡的约数",
    "a divisor or a multiple of the model's {n} key heads": "模型 {n} 个键头的约数或倍数",
    "a number that divides {n} GPUs": "能整除 {n} 张卡的数",
    "a power of two": "二的幂",
    "{gpus}, as all roles share the GPUs": "{gpus}，因为所有角色共用显卡",
    "{value!}, as in the whole job": "{value}，与整个任务相同",
    "{value!}, as for all roles": "{value}，与所有角色相同",
    "{value!}, as the layer": "{value}，与该层相同",
    "{value!}, as the model": "{value}，与模型相同",
    "prompt_len and response_len": "prompt_len 和 response_len",
    "for RL tasks alone; {task} has seq_len": "只用于强化学习任务；{task} 用 seq_len",
    "{allowed?}; it has no such setting": "{allowed}；它没有这个设置",
    "colocated; {task} has no role on GPUs of its own": "colocated；{task} 没有独占显卡的角色",
    "with {what!}": "与 {what} 一起",
    "own, or with {what!}": "own，或与 {what} 一起",
    "less; vLLM finds {free} free on startup, less than the {wanted} it is to use": (
        "更小；vLLM 启动时空闲 {free}，少于要用的 {wanted}"
    ),
    "more; vLLM has no available memory for the cache blocks": "更大；vLLM 没有显存可放缓存块",
    "more; the model's max seq len ({length}) is larger than the {n} tokens that can be stored in KV cache": (
        "更大；模型的最大长度（{length}）超过 KV 缓存能放的 {n} 个 token"
    ),
    "fsdp2, or none where no GPU is left to share shards with": "fsdp2；没有可分担分片的显卡时用 none",
    "full; adapters of cut layers are not modelled": "full；没有模拟被切开的层上的适配器",
    "for pretrain and sft, whose loss takes cut logits": "用于 pretrain 和 sft，它们的损失接受切开的 logits",
    "false; no plan is known": "false；没有已知的方案",
    "true; sequences are cut without their padding": "true；序列去掉填充后再切",
    "for method full in mixed, without offload": "method full、mixed 且不 offload 时",
    "with trainer own, transformers; not modelled": "trainer own、transformers 时；没有模拟",
    "0.18 or later": "0.18 或更新",
    "true, or packing; padded sequences are not modelled": "true，或 packing；没有模拟带填充的序列",
    "flash; others are not modelled": "flash；没有模拟其他取值",
    "a number with loss chunked, as CELOSS_PARALLEL_SIZE says, else null": (
        "loss chunked 时为 CELOSS_PARALLEL_SIZE 的数值，否则为 null"
    ),
    "{allowed?}; not modelled": "{allowed}；没有模拟",
    "a list; not modelled": "一个列表；没有模拟",
    "own for layers that borrow keys or have inputs of their own; not modelled": (
        "有借用键或自己输入的层时为 own；没有模拟"
    ),
    "a divisor of the {n} key heads of some layers": "部分层的 {n} 个键头的约数",
    "a divisor of the {n} groups of its state spaces": "状态空间 {n} 个组的约数",
    "a divisor of the {n} heads of its state spaces": "状态空间 {n} 个头的约数",
    "{allowed?}; not modelled there": "{allowed}；那里没有模拟",
    "none; generation is not modelled there": "none；那里没有模拟生成",
    "full, or with trainer torchtitan its chunks": "full，或用 trainer torchtitan 的分块",
    "false; it has no switch for it": "false；它没有这个开关",
    "pretrain.py compiles the whole model: computed as not compiled": "pretrain.py 编译整个模型：按未编译计算",
    "eager; it has no switch for it": "eager；它没有这个开关",
    "eager; it raises": "eager；它会报错",
    "full; both from {version} on": "full；二者自 {version} 起可以同用",
    "transformers; read for {families!}": "transformers；只读过 {families} 的代码",
    "1, or with experts_implementation torchtitan, automodel": (
        "1，或与 experts_implementation torchtitan、automodel 一起"
    ),
    "at most a node's {n} GPUs, in one process": "至多为单节点的 {n} 张卡，同属一个进程",
    "a divisor of the {n} GPUs that shard the model": "共同持有模型分片的 {n} 张卡的约数",
    "root; its embedding is the head, too": "root；它的 embedding 也是输出头",
    "one that steps after backward": "反向之后才更新的优化器",
    "one that trains": "能训练的优化器",
    "with full, whose checkpoints move": "与 full 一起，移动的是它的检查点",
    "true, as it steps no other way": "true，它只能这样更新",
    "a teacher, from whom gkd learns": "一个教师模型，gkd 向它学习",
    "dpo, sft; not modelled": "dpo、sft；没有模拟",
    "0; gkd's student generates": "0；只有 gkd 的学生模型先生成",
    "0, or for dpo and gkd with trainer ms-swift": "0，或用于 dpo 与 gkd 并用 trainer ms-swift",
    "{a#} to {b#}, all in four bits and all in 16": "{a} 到 {b}，即全部 4 位和全部 16 位",
    "null; with torch, trl and trainer own, {names!}": "null；或用 torch、trl，且 trainer 为 own、{names}",
    "null; it writes the configuration itself": "null；它自己写配置",
    "a number; DeepSpeed puts none in its place": "一个数；DeepSpeed 不会替换它",
    "null, or with {names!}": "null，或与 {names} 一起",
    "null, or with none, ddp; not modelled": "null，或与 none、ddp 一起；没有模拟",
    "with none, ddp; not modelled": "与 none、ddp 一起；没有模拟",
    "with torch and trainer {names!}": "用 torch，且 trainer 为 {names}",
    "false; it has none that is modelled": "false；它没有已模拟的视觉塔",
    "false; images.freeze says if it is trained": "false；是否训练由 images.freeze 说明",
    "false; {model} has a mask of each sample": "false；{model} 的每个样本各有掩码",
    "one with the student's, {n#}": "与学生词表相同的模型，{n}",
    "1, or with sharding megatron": "1，或与 sharding megatron 一起",
    "false, or in your own loop with outputs_kept": "false，或在自己的循环里与 outputs_kept 一起",
    "false, or with expert_capacity": "false，或与 expert_capacity 一起",
    "null, or with routed experts under Megatron-core": "null，或用于 Megatron-core 下有路由专家的模型",
    "{n#} at most, all of its layers": "至多 {n}，即它的全部层",
    "{n#} at most, all of its tokens": "至多 {n}，即它的全部 token",
    "1, or with expert_parallel above 1": "1，或在 expert_parallel 大于 1 时",
    "one micro batch a GPU, {n#}": "每卡一个 micro batch，{n}",
    "eager; Liger has none for it that is modelled": "eager；Liger 没有已模拟的对应 kernel",
    "1, or for pretrain and sft": "1，或用于 pretrain 和 sft",
    "sdpa, whose place PyTorch's ring takes": "sdpa，由 PyTorch 的环形注意力代替",
    "16 bits for SDPA's flash kernel": "SDPA 的 flash 内核需要 16 位",
    "false; the ring knows no borders between sequences": "false；环形注意力不区分序列边界",
    "1; a state passes through all positions": "1；状态要依次经过所有位置",
    "fla; only its kernels keep sequences apart": "fla；只有它的 kernel 能分开各个序列",
    "false; batches of {model!} are padded": "false；{model} 的批次总会填充",
    "less than the mean of {n#} tokens": "小于平均长度 {n} 个 token",
    "a divisor of {heads}, heads of every kind": "{heads} 的约数，即各种头都能整除的数",
    "fla, which it needs": "fla；没有它就不能运行",
    "a divisor of the {n} key heads of linear attention that a tensor-parallel rank has": (
        "张量并行下每张卡上线性注意力的 {n} 个键头的约数"
    ),
    "{place@}: given {given!}, allowed: {other?} for the family {family!}, or verl from {version} on: mbridge "
    "{release} does not know it": (
        "{place}：给定 {given}，{family} 系列允许：{other}，或 verl {version} 及以后的版本：mbridge {release} 没有它"
    ),
    "{place@}: given {given!}, allowed: {other?} for the family {family!}, or megatron-swift from {version} on; what "
    "ran before is not modelled": (
        "{place}：给定 {given}，{family} 系列允许：{other}，或 megatron-swift {version} 及以后的版本；没有模拟更早的"
    ),
    "1; SDPA's flash kernel cannot attend for it": "1；SDPA 的 flash 内核不能为它计算注意力",
    "false; stages hand on tensors of one size": "false；各段传递同样大小的张量",
    "a micro batch for each stage, {least?}": "每段一个微批次，{least}",
    "1; it has no stages": "1；它没有流水线",
    "1; {why}": "1；{why}",
    "false; {why}": "false；{why}",
    "DeepSpeed's AutoTP is not modelled": "没有模拟 DeepSpeed 的 AutoTP",
    "accelerate's ring attention is not modelled": "没有模拟 accelerate 的环形注意力",
    "its losses read the whole head": "它的损失要读整个输出头",
    "its FSDP trainer does not cut layers: take sharding megatron": "它的 FSDP 训练不切层：改用 sharding megatron",
    "fsdp1; megatron is modelled from {version} on": "fsdp1；megatron 自 {version} 起有模拟",
    "true for a model with experts": "有专家的模型须为 true",
    "a divisor of a stage's {n} GPUs": "一段的 {n} 张卡的约数",
    "none; not modelled": "none；没有模拟",
    "{value!}, as the actor's with sharding megatron": "{value}，sharding megatron 时与 actor 的相同",
    "below 1; offload.optimizer alone steps all of it there": "小于 1；全部在主机上更新由 offload.optimizer 单独表示",
    "true, or with offload.fraction": "true，或与 offload.fraction 一起",
    "fp32, or with {name!}": "fp32，或与 {name} 一起",
    "false; offload.masters says where its masters are": "false；其主权重在哪里由 offload.masters 表示",
    "false, or with trainer {names*}": "false，或与训练器 {names} 一起",
    "{}, which it always trains": "{}，它总要训练",
    "{}; it has the actor's flags": "{}；它的参数与 actor 相同",
    "false; FSDP's units have it": "false；它属于 FSDP 的单元",
    "grpo, reinforce++, sft; ppo is modelled from {version} on": "grpo、reinforce++、sft；ppo 自 {version} 起有模拟",
    "{}, or none; it runs in the actor's place": "{} 或 none；它在 actor 的位置上运行",
    "none, loss; modelled with {names!}": "none、loss；只模拟了 {names}",
    "none, loss; modelled for {what?}": "none、loss；只模拟了{what}",
    "none; modelled for {names!}": "none；只模拟了 {names}",
    "none, model; this loss is a kernel already": "none、model；这种损失本身已是内核",
    "a model's own operations": "模型自身的算子",
    "layers as Llama's": " Llama 那样的层",
    "null, or with device_map auto a divisor of gpus": "null，或在 device_map auto 下是 gpus 的约数",
    "GPUs of which the first holds the vision tower of {family}": "第一张放得下 {family} 整个视觉塔的几张 GPU",
    "routed experts": "路由专家",
    "experts that get adapters": "带适配器的专家",
    "layers that attend to images": "关注图像的层",
    "a part that hears": "听声音的部分",
    "false; torchao gathers so with tensorwise under fsdp2": "false；torchao 只在 fsdp2 的 tensorwise 下这样聚集",
    "null; PyTorch's setting is for CUDA": "null；PyTorch 的这个设置用于 CUDA",
    "null, or with {name!} {version!} or later": "null，或 {name} {version} 及更新版本",
    "such that {n} layers leave some to the last stage": "使 {n} 层还有一些留给最后一段",
    "an integer from 1, as there are layers of experts": "从 1 起的整数，因为有专家层",
    "as many counts as pipeline_parallel = {n}, {layers} layers together": (
        "与 pipeline_parallel = {n} 一样多的数，合计 {layers} 层"
    ),
    "such that {stages} stages with as many chunks divide the model's {n} layers, or with pipeline_layers": (
        "使 {stages} 段各这么多块能整除模型的 {n} 层，或给出 pipeline_layers"
    ),
    "1, or with sharding megatron or fsdp2 and pipeline_parallel above 1": (
        "1，或与 sharding megatron 或 fsdp2 一起，且 pipeline_parallel 大于 1"
    ),
    "at most {n}; of more not all stay gathered": "至多 {n}；更多块时并非都一直保持聚合",
    "at most {most}, so that every piece has one of {n} layers": "至多 {most}，使每块都有 {n} 层中的至少一层",
    "multiples of virtual_pipeline = {n}, but for a layer fewer at the ends": (
        "virtual_pipeline = {n} 的倍数，首尾各可少一层"
    ),
    "a multiple of {n}, so that stages take turns": "{n} 的倍数，使各段轮流运行",
    "null, or with megatron, fsdp2 and selective": "null，或与 megatron、fsdp2 和 selective 一起",
    "others; it has no such part": "其他；它没有这一部分",
    "others; what runs here does not know it": "其他；这里运行的版本没有它",
    "as many in each stage between first and last": "首尾之间各段层数相同",
    "null, or with sharding megatron": "null，或与 sharding megatron 一起",
    "a multiple of {n}, for {degrees!}": "{n} 的倍数，因为 {degrees}",
    "a model, which scores every micro batch": "一个模型，每个微批次都由它打分",
    "none; it has the trained model's": "不填；与受训模型相同",
    "{model!}, without adapters": "{model}，去掉适配器",
    "with GPUs that share a layer": "须有共用一层的显卡",
    "false, as vLLM that sleeps refuses them": "false，因为会休眠的 vLLM 不接受它",
    "true, or false with torch and zero3": "true；torch 加 zero3 时也可为 false",
    "none, or a size with torch and zero3": "none；torch 加 zero3 时也可为一个数",
    "false; stages reduce once a step anyway": "false；流水线本来就每步只归约一次",
    "own, by PEFT's wrapping policy": "own，按 PEFT 的包装策略",
    "mixed, fp16; DeepSpeed has both": "mixed、fp16；DeepSpeed 两者都有",
    "fp32, DeepSpeed demands it": "fp32，DeepSpeed 要求如此",
    "false for the trained model": "受训的模型须为 false",
    "mixed, as DeepSpeed keeps fp32 master weights": "mixed，因为 DeepSpeed 保留 fp32 主权重",
    "adamw; bitsandbytes steps on a GPU, and Accelerate makes it DeepSpeedCPUAdam, with fp32 states": (
        "adamw；bitsandbytes 在显卡上更新，而 Accelerate 会改用状态为 fp32 的 DeepSpeedCPUAdam"
    ),
    "adamw, adamw-torchao-8bit; bitsandbytes' kernels take no DTensors, as parameters of FSDP 2 are": (
        "adamw、adamw-torchao-8bit；FSDP 2 的参数是 DTensor，bitsandbytes 的内核不接受"
    ),
    "{names!}, or none and ddp for zero_stage 0": "{names}；zero_stage 0 用 none 和 ddp",
    "{names!}; 4-bit weights are not partitioned": "{names}；4 位权重不能分片",
    "full, lora; this Transformers cannot move a 4-bit model": "full、lora；这个版本的 Transformers 不能移动 4 位模型",
    "false; packing for {task} came with {version}": "false；{task} 的序列打包自 {version} 起才有",
    "false; RL got it with {version}": "false；强化学习自 {version} 起才有",
    "eager; it came with {version}": "eager；自 {version} 起才有",
    "0; it came with {version}": "0；自 {version} 起才有",
    "false; it came with {version}": "false；自 {version} 起才有",
    "false, until {version}": "{version} 之前须为 false",
    "{least#}, prompt and response, to {most#}": "提示加回答的 {least} 到 {most}",
    "{least#} to {most#}, a part of expected_len = {n#}": "{least} 到 {most}，是 expected_len = {n} 的一部分",
    "full; adapters came with {version}": "full；适配器自 {version} 起才有",
    "a model, as PPOTrainer takes all four": "一个模型，PPOTrainer 四个都要",
    "hf, or vllm with placement separate": "hf；placement separate 时也可用 vllm",
    "1, as one process has the engine": "1，因为引擎在一个进程里",
    "a divisor of the {n} completions of a micro batch": "一个微批次的 {n} 个回答数的约数",
    "{version!} or later": "{version} 或更新版本",
    "{release!} or later, or a newer versions.transformers": "{release} 或更新版本，或更新的 versions.transformers",
    "a newer versions.transformers": "更新的 versions.transformers",
    "{tasks!}; its trainer came with {version}": "{tasks}；它的训练器自 {version} 起才有",
    "{tasks!}; its trainer went with {version}": "{tasks}；它的训练器自 {version} 起已移除",
    "{names!} in release {version!}": "{version} 版本中为 {names}",
    "an actor, which always trains": "一个 actor，它总要训练",
    "an actor, which it always trains": "一个 actor，它总要训练",
    "a critic, which gae needs": "一个 critic，gae 需要它",
    "a reference, whatever the KL coefficient": "一个参考模型，不论 KL 系数是多少",
    "a reference, which train_dpo always loads": "一个参考模型，train_dpo 总会加载它",
    "a reward model": "一个奖励模型",
    "one that Transformers can make score sequences": "一个 Transformers 有序列打分类的模型",
    "{names!}; PEFT refuses the out_proj of these state spaces": "{names}；PEFT 拒绝适配这些状态空间层的 out_proj",
    "{names!}; PEFT's adapter fails beside o_a_proj, which multiplies group by group": (
        "{names}；PEFT 的适配器在 o_a_proj 旁会出错，因为它逐组相乘"
    ),
    "{names!}; PEFT would adapt routed experts, too": "{names}；PEFT 会连路由专家一起适配",
    "{names!}; PEFT would wrap the router, too, and fail on what it returns": (
        "{names}；PEFT 会连路由器一起包装，并因其返回值而出错"
    ),
    "a role to train for {task}": "{task} 要训练的角色",
    "full; vLLM cannot take adapters over": "full；vLLM 不能接收适配器",
    "true, which it then turns on": "true，它随后会自动打开",
    "false": "false",
    "for reference and reward, by one flag": "用于参考模型和奖励模型，由一个参数设定",
    "zero1, zero2, or vllm": "zero1、zero2，或 vllm",
    "less than 0.9, of which ray.py makes 0.4": "小于 0.9，ray.py 会把它改为 0.4",
    "GPUs without the actor": "不与 actor 共用的卡",
    "own; its scripts are for {tasks!}": "own；它的脚本用于 {tasks}",
    "own; the Trainer is for {tasks!}": "own；这个 Trainer 用于 {tasks}",
    "more; loaded weights leave no memory for SGLang's KV cache": "更大；载入权重后没有显存可放 SGLang 的 KV 缓存",
    "none; nothing is trained": "none；不训练任何东西",
    "none; modelled with compiled layers": "none；只模拟了编译的层",
    "none; its linears are no multiples of {n#}": "none；它的线性层不是 {n} 的倍数",
    "with a multiple of {n#}": "{n} 的倍数",
    "false; modelled for routed experts of Transformers": "false；只模拟了 Transformers 的路由专家",
    "false; modelled with torch and trainer {trainers!}": "false；只模拟了 torch 与训练器 {trainers}",
    "false; its experts are linears": "false；它的专家是线性层",
    "false, or with none, ddp; not modelled": "false，或与 none、ddp 一起；没有模拟",
    "false, or with both sequence_parallel and compiled layers": "false，或同时使用 sequence_parallel 与编译的层",
    "false, or with layers of Megatron-core that have no fusions": "false，或用于没有融合算子的 Megatron-core 层",
    "none, or with {field!} {values!}": "none，或与 {field} {values} 一起",
    "{usual!}, or roles.reference none": "{usual}，或 roles.reference none",
    "false, or for {task!}": "false，或用于 {task}",
    "true, or with {field!} {values!}": "true，或与 {field} {values} 一起",
    "default, or with {field!} {values!}": "default，或与 {field} {values} 一起",
    "1, or with {field!} {values!}": "1，或与 {field} {values} 一起",
    "false, or with batches that are padded": "false，或使用填充的批次",
    "false, or with {field!} {values!}": "false，或与 {field} {values} 一起",
    "null, or with float8": "null，或与 float8 一起",
    "below the model's {n#} layers, all of them on one GPU": "小于模型的 {n} 层，且所有层在同一张卡上",
    "none; {forms!}": "none；{forms}",
    "false, or with float8 tensorwise": "false，或与 float8 tensorwise 一起",
    "false, or with full": "false，或与 full 一起",
    "full, or qlora for weights in four bits": "full，或用 qlora 表示四位权重",
    "with DeepSpeed for the whole job": "整个任务都用 DeepSpeed",
    "{value!}, over tiles of the logits": "{value}，分块处理 logits",
    "false; SFTTrainer alone packs": "false；只有 SFTTrainer 会打包",
    "at least 2; its KL term mixes the pairs of a batch": "至少 2；它的 KL 项把一个批次中的样本互相配对",
    "fsdp-mixed, which bf16 sets, bf16, fp32": "fsdp-mixed（由 bf16 设定）、bf16、fp32",
    "any but the head, whose weight the loss reads itself": "除输出头外的任何层，因为损失直接读它的权重",
    "any but the head": "除输出头外的任何层",
    "any but the embedding": "除嵌入层外的任何层",
    "{others?}, or with loss full": "{others}，或与 loss full 一起",
    "{others?}, or with sharding {ways!}": "{others}，或与 sharding {ways} 一起",
    "linears of layers, too; it trains none of these": "还须有各层的线性层；这些它都不训练",
    "{modules!}, as it trains a copy whole": "{modules}，因为它完整训练一个副本",
    "0; its linears drop nothing out": "0；它的线性层不做 dropout",
    "none, or with sharding none, ddp": "none，或与 sharding none、ddp 一起",
    "none, or with bf16; copies in fp32 are not modelled": "none，或用 bf16；fp32 的副本没有模拟",
    "the policy, which it trains": "它所训练的策略模型",
    "completions that are a multiple of micro_batch x GPUs of the actor = {n}": (
        "回答数为 micro_batch × actor 的卡数 = {n} 的倍数"
    ),
    "{model!}, the policy's own": "{model}，与策略模型相同",
    "with vllm, as a server": "与 vllm 一起，作为服务",
    "none, it shares the actor's": "不给，它与 actor 共用",
    "none, it has the policy's": "不给，它用策略的",
    "{n}; vLLM serves no replicas of a model without experts": "{n}；没有专家的模型，vLLM 不提供副本",
    "ppo, grpo, reinforce++; sft from {version} on": "ppo、grpo、reinforce++；sft 自 {version} 起",
    "true; batches have no padding": "true；批次没有填充",
    "colocated; main_ppo has one pool of GPUs, and the trainers with two are not modelled yet": (
        "colocated；main_ppo 只有一组显卡，而使用两组显卡的训练程序尚未建模"
    ),
    "with lora, whose adapters it gathers": "与 lora 一起，它会收集其适配器",
    "none; its server is not modelled yet": "none；它的服务尚未模拟",
    "true, which it forces": "true，它强制如此",
    "with colocated, where others need the GPUs": "与 colocated 一起，那时别的角色需要显卡",
    "with vllm 0.8 to 0.10, which have two engines": "vllm 0.8 到 0.10，它们有两个引擎",
    "with max_tokens_per_gpu, for dynamic batches": "与 max_tokens_per_gpu 一起，用于动态批次",
    "rollout.max_tokens_per_gpu, as batches that are scored are dynamic, too": (
        "rollout.max_tokens_per_gpu，因为打分的批次也是动态的"
    ),
    "none beside the trained model, which the other fields describe": "除受训的模型外没有，它由其他字段描述",
}
# The changes that pages are about: their names, their jobs, what switches them on.
REMEDIES = {
    "8-bit Adam": "8 位 Adam",
    "bf16 gradients": "bf16 梯度",
    "Fewer samples": "减少样本数",
    "Fewer workers": "减少进程数",
    "Gradient accumulation": "梯度累积",
    "Model parallelism": "模型并行",
    "Packing": "序列打包",
    "Expert parallelism": "专家并行",
    "SFT of Qwen3 30B-A3B on 16 H100, experts over eight GPUs": "Qwen3 30B-A3B 的 SFT，16 张 H100，专家分到八张卡",
    "GRPO of Qwen3 235B-A22B on 128 H100, experts over eight GPUs and over 32": (
        "Qwen3 235B-A22B 的 GRPO，128 张 H100，专家分到八张卡和 32 张卡"
    ),
    "LoRA of Qwen3 30B-A3B on 16 H100, experts over four GPUs": "Qwen3 30B-A3B 的 LoRA，16 张 H100，专家分到四张卡",
    "Pinned memory": "锁页内存",
    "Ray with vLLM": "Ray 加 vLLM",
    "Shorter sequences": "更短的序列",
    "Smaller micro batch": "更小的微批次",
    "Smaller rollout n": "更小的 rollout n",
    "ZeRO stages": "ZeRO 各阶段",
    "activation checkpointing": "激活重计算",
    "{task} of {model}": "{model} {task}",
    "{task} of {model} on {machine}": "{machine} 上的 {model} {task}",
    "{task} of {model} with vLLM on {machine}": "{machine} 上的 {model} {task}，用 vLLM",
    "{task} of {model} with verl on {machine}": "{machine} 上的 {model} {task}，用 verl",
    "{task} of {model} under {sharding}": "{sharding} 下的 {model} {task}",
    "{task} of {model} under {sharding} on {machine}": "{machine} 上 {sharding} 下的 {model} {task}",
    "{task} of {model} with {n#} tokens, checkpoints on the host": "{n} 个 token 的 {model} {task}，检查点放在主机",
    "{task} of {model} at {n#} tokens": "长度 {n} 的 {model} {task}",
    "{task} of {model} on an H100 with room to spare": "显存有余的 H100 上的 {model} {task}",
    "{task} at {n#} tokens": "长度 {n} 的 {task}",
    "{task} on {machine}": "{machine} 上的 {task}",
    "{task} under FSDP with TRL": "用 TRL、FSDP 下的 {task}",
    "one {gpu}": "一张 {gpu}",
    "four {gpu}": "四张 {gpu}",
    "six {gpu}": "六张 {gpu}",
    "eight {gpu}": "八张 {gpu}",
    "sixteen {gpu}": "十六张 {gpu}",
    "{n#} H100": "{n} 张 H100",
    "optimizer offloaded": "卸载优化器",
    "vLLM asleep": "vLLM 休眠",
    "{sharding} with offload": "{sharding} 加卸载",
    "{before} to {after}": "{before} 换成 {after}",
    "{n#} to {less#} tokens": "{n} 个 token 换成 {less} 个",
    "n {n#} to {less#}": "n 从 {n} 到 {less}",
    "{n#} prompts in a rollout to {less#}": "一次 rollout {n} 条提示换成 {less} 条",
    "{n#} sequences in a step to {less#}": "一步 {n} 条序列换成 {less} 条",
    "{n#} sequences a step": "一步 {n} 条序列",
    "eight workers to four": "八个进程换成四个",
    "from PyTorch's own kernel": "从 PyTorch 自带的内核换来",
    "more micro-batches": "更多微批次",
    "fp32 to bf16 compute": "fp32 换成 bf16 计算",
    "fp32 to autocast": "fp32 换成 autocast",
    "The same with LoRA": "同上，用 LoRA",
    "The same with everything in bf16": "同上，全部用 bf16",
    "The same with verl {version}": "同上，用 verl {version}",
    "The same with vLLM awake, then asleep while others work": "同上，vLLM 先常驻，后在别的角色工作时休眠",
    "From shared GPUs to GPUs of their own": "从共用显卡到各用各的显卡",
    "vLLM over one GPU and over four": "vLLM 用一张卡和用四张卡",
    "vLLM over two GPUs and over four": "vLLM 用两张卡和用四张卡",
    "layers and residual stream over eight": "层和残差流分到八张卡",
    "{task} of {model} with sequences of {n#} tokens, each over four GPUs": (
        "{model} {task}，序列 {n} 个 token，每条分到四张卡"
    ),
    "cap of {n#} tokens": "上限 {n} 个 token",
    "{n#} on average": "平均 {n}",
    "grouped by length": "按长度分组",
    "{task} with every sequence at its cap": "每条序列都到上限的 {task}",
    "from Transformers' generate to vLLM": "从 Transformers 的 generate 换成 vLLM",
    "an eighth of the lengths": "长度减到八分之一",
    "four pairs to one": "四对样本换成一对",
    "GRPO with Logic-RL's fork of verl": "用 Logic-RL 的 verl 分支做 GRPO",
    "{n#} by default": "默认为 {n}",
    "and with it reference and reward model": "参考模型和奖励模型也随之",
    "verl shards by FSDP, which is stage 3; {field!} is the default": "verl 用 FSDP 分片，相当于阶段 3；默认为 {field}",
    "the stage stands in that file; or in accelerate's": "阶段写在这个文件里；或在 accelerate 的文件里",
    "optimizer and master weights": "优化器和主权重",
    "weights of frozen roles, under ZeRO-3 alone": "冻结角色的权重，只在 ZeRO-3 下",
    "between the actor's own phases": "在 actor 自己的阶段之间",
    "{field!} in accelerate's file": "accelerate 文件中的 {field}",
}
MESSAGES: Mapping[str, str] = {
    **COMPONENTS, **MOMENTS, **VERDICTS, **JOBS, **HEADINGS, **HINTS, **LINES, **TERMS, **ADVICE, **COMMANDS,
    **CALCULATOR, **COMPARISON, **DIAGNOSIS, **SCRIPTS,
    **REFUSALS, **REMEDIES,
}  # fmt: skip
