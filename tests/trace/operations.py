"""The operations that one more layer dispatches, forward and backward: a case a line in, counts of kernels, of all, and
bytes out.

The model's whole config comes before them.

Bytes are those that operations beside products and attention read and write, a token; kept, the tensors that forward
saves for backward.
"""

import json
import sys
import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

TOKENS = 128
VIEWS = {"_unsafe_view", "empty_like", "new_empty_strided"}
PRODUCTS = ("mm", "addmm", "bmm", "_grouped_mm", "_scaled_dot_product")


class Count(TorchDispatchMode):
    """Kernels, all operations, and bytes of those that multiply nothing."""

    def __init__(self):
        super().__init__()
        self.kernels = self.all = self.bytes = self.kept = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function._schema.name.split("::")[1]
        self.all += 1
        view = any(r.alias_info and not r.alias_info.is_write for r in function._schema.returns)
        if not view and name not in VIEWS:
            self.kernels += 1
            if not name.startswith(PRODUCTS):
                tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
                # an expanded gradient of a mean is read as the few numbers it is
                self.bytes += sum(t.untyped_storage().nbytes() if 0 in t.stride() else t.nbytes for t in tensors)
        return out

    def keep(self, tensor):
        """Counts a tensor that is saved for backward."""
        self.kept += 1
        return tensor


def configured(case, layers):
    """The config of a model with so many layers, all of one type if their types are told."""
    told = case["config"]
    types = {"layer_types": told["layer_types"] * layers} if "layer_types" in told else {}
    return AutoConfig.for_model(**{**told, **types}, num_hidden_layers=layers, use_cache=False)


def counted(case, layers):
    """Counts of forward and of backward of a model with so many layers."""
    config = configured(case, layers)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
    if case["checkpointing"]:
        model.gradient_checkpointing_enable({"use_reentrant": case["checkpointing"] == "reentrant"})
    model.train()
    if case["lora"]:
        from peft import LoraConfig, get_peft_model

        names = [
            n.rpartition(".")[2]
            for n, m in model.named_modules()
            if isinstance(m, torch.nn.Linear) and ".layers.0." in n
        ]
        lora = LoraConfig(r=8, target_modules=names, task_type="CAUSAL_LM")
        model = get_peft_model(model, lora, autocast_adapter_dtype=case["lora"] == "fp32")
    ids = torch.zeros(1, TOKENS, dtype=torch.long)
    forward, backward = Count(), Count()
    if not case["checkpointing"]:  # in a pass of its own: hooks change what is dispatched
        with torch.autograd.graph.saved_tensors_hooks(forward.keep, lambda tensor: tensor):
            model(input_ids=ids, labels=ids)
    with forward:
        loss = model(input_ids=ids, labels=ids).loss
    with backward:
        loss.backward()
    return forward, backward


warnings.simplefilter("ignore")
for line in sys.stdin:
    case = json.loads(line)
    one, two = counted(case, 1), counted(case, 2)
    print(
        json.dumps(
            [
                configured(case, 2).to_dict(),
                *(
                    {name: getattr(b, name) - getattr(a, name) for name in ("kernels", "all", "bytes", "kept")}
                    for a, b in zip(one, two, strict=True)
                ),
            ],
            default=str,
        ),
        flush=True,
    )
