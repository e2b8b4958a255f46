"""The trained parameters of Transformers' own modules: a config.json a line in, names and shapes a line out."""

import json
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, MllamaForCausalLM
from transformers.initialization import no_init_weights

for line in sys.stdin:
    config = json.loads(line)
    with no_init_weights(), torch.device("meta"):
        usual = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
        own = AutoConfig.for_model(config.pop("model_type"), **config)
        # a language model's config, which Auto classes know as a part of another's alone
        model = MllamaForCausalLM(own) if own.model_type == "mllama_text_model" else usual.from_config(own)
        model.tie_weights()
    trained = {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    print(json.dumps(trained), flush=True)
