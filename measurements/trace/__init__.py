"""Traces the memory of one training step of a real Transformers model, without a GPU.

The model's own code, autograd, PEFT, FSDP2 and torch.optim run on fake `cuda` tensors; every allocation and release is
followed, with sizes rounded as the CUDA allocator rounds them. The result is a record: the peak, its phase and
operator, and its parts.
"""
