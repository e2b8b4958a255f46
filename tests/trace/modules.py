"""The trained parameters of Transformers' own modules: a config.json a line in, names and shapes a line out."""

import json
import sys

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    MllamaForCausalLM,
    Qwen2AudioForConditionalGeneration,
    VoxtralForConditionalGeneration,
)
from transformers.initialization import no_init_weights

OWN = {  # whose config Auto classes know as a part of another's alone, or not as that of a causal language model
    "mllama_text_model": MllamaForCausalLM,
    "qwen2_audio": Qwen2AudioForConditionalGeneration,
    "voxtral": VoxtralForConditionalGeneration,
}
TABLE = "audio_tower.embed_positions.weight"  # which is a parameter, and never trained

for line in sys.stdin:
    config = json.loads(line)
    with no_init_weights(), torch.device("meta"):
        usual = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
        own = AutoConfig.for_model(config.pop("model_type"), **config)
        model = OWN[own.model_type](own) if own.model_type in OWN else usual.from_config(own)
        model.tie_weights()
    trained = {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad or name.endswith(TABLE)}
    print(json.dumps(trained), flush=True)
