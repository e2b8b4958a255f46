"""Names of models as people type them: each leads to the model with these shapes, or is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

import pytest
from commands import Run
from hypothesis import given
from hypothesis import strategies as st

from calc.catalog.catalog import CatalogError, load
from calc.catalog.names import adapted, names, plain, words
from calc.catalog.near import misspelt
from calc.resolve.parse import parse
from calc.scenario.scenario import ScenarioError
from calc.site.i18n.speech import say

# What people type, and the model whose tensors that has; "": one that is not modelled.
TYPED = {
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": "deepseek-r1-distill-qwen-1.5b",
    "DeepScaleR-1.5B-Preview": "deepseek-r1-distill-qwen-1.5b",
    "DeepSeek-R1-Distill-Qwen-7B": "qwen2.5-7b",
    "deepseek-r1-distill-qwen-14b": "qwen2.5-14b",
    "R1-Distill-Qwen-32B": "qwen2.5-32b",
    "unsloth/DeepSeek-R1-Distill-Llama-8B": "llama-3.1-8b",
    "R1-Distill-Llama-70B": "llama-3.1-70b",
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": "qwen3-8b",
    "DeepSeek-R1": "deepseek-v3",
    "deepseek v3.1": "deepseek-v3",
    "Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "qwen2.5:7b": "qwen2.5-7b",
    "Qwen 2.5 14B Instruct": "qwen2.5-14b",
    "Qwen/Qwen2.5-7B-Instruct-1M": "qwen2.5-7b-1m",
    "unsloth/Qwen2.5-7B-Instruct-1M-bnb-4bit": "qwen2.5-7b-1m",
    "qwen2.5-7b-32k": "qwen2.5-7b",
    "01-ai/Yi-6B-Chat": "yi-6b",
    "Yi-6B-200K": "yi-6b-200k",
    "llava-hf/llava-1.5-7b-hf": "llava-1.5-7b",
    "llava-v1.5-13b": "llava-1.5-13b",
    "llava-hf/llava-v1.6-vicuna-7b-hf": "llava-1.6-vicuna-7b",
    "llava-v1.6-34b": "llava-1.6-34b",
    "lmms-lab/llama3-llava-next-8b": "llama3-llava-next-8b",
    "ibm-granite/granite-vision-3.3-2b": "granite-vision-3.3-2b",
    "llava-hf/llava-onevision-qwen2-7b-ov-hf": "llava-onevision-7b",
    "LLaVA-OneVision-72B": "llava-onevision-72b",
    "mistralai/Pixtral-12B-2409": "pixtral-12b",
    "ServiceNow-AI/Apriel-1.6-15b-Thinker": "apriel-1.6-15b",
    "ServiceNow-AI/Apriel-1.5-15b-Thinker": "apriel-1.6-15b",
    "mistralai/Mistral-Large-3-675B-Instruct-2512": "mistral-large-3",
    "mistral large 3": "mistral-large-3",
    "rednote-hilab/dots.ocr": "dots.ocr",
    "stabilityai/stablelm-2-12b-chat": "stablelm-2-12b",
    "mistralai/Voxtral-Mini-3B-2507": "voxtral-mini-3b",
    "Voxtral Small 24B": "voxtral-small-24b",
    "Qwen/Qwen2-Audio-7B-Instruct": "qwen2-audio-7b",
    "Qwen/Qwen2.5-14B-Instruct-1M": "qwen2.5-14b-1m",
    "Qwen/Qwen2.5-Math-1.5B": "qwen2.5-1.5b",
    "Qwen2.5-Math-7B-Instruct": "qwen2.5-7b",
    "qwen2.5-math-72b-instruct": "qwen2.5-72b",
    "Qwen2.5-Coder-0.5B-Instruct": "qwen2.5-0.5b",
    "unsloth/Qwen2.5-Coder-7B-bnb-4bit": "qwen2.5-7b",
    "Qwen2.5-Coder-32B-Instruct": "qwen2.5-32b",
    "unsloth/Qwen2.5-3B-Instruct-unsloth-bnb-4bit": "qwen2.5-3b",
    "QwQ-32B": "qwen2.5-32b",
    "llama-3-1-8b": "llama-3.1-8b",
    "unsloth/llama-3-2-3b-instruct": "llama-3.2-3b",
    "qwen2-5-7b-instruct": "qwen2.5-7b",
    "glm-4-5-air": "glm-4.5-air",
    "phi-3-5-mini-instruct": "phi-3-mini-128k",
    "gemma-3-27b": "gemma-3-27b",
    "BAAI/bge-reranker-v2-gemma": "gemma-2b",
    "llama3.2-vision:11b": "llama-3.2-11b-vision",
    "Xkev/Llama-3.2V-11B-cot": "llama-3.2-11b-vision",
    "meta-llama/Llama-Guard-3-11B-Vision": "llama-3.2-11b-vision",
    "Llama 3.2 Vision": "llama-3.2-11b-vision",
    "unsloth/Llama-3.2-11B-Vision-Instruct-unsloth-bnb-4bit": "llama-3.2-11b-vision",
    "Llama 3.2 90B Vision Instruct": "llama-3.2-90b-vision",
    "Mistral-Small-24B-Instruct-2501": "mistral-small-24b",
    "simplescaling/s1.1-32B": "qwen2.5-32b",
    "OpenThinker-7B": "qwen2.5-7b",
    "Skywork-OR1-7B": "qwen2.5-7b",
    "Sky-T1-32B-Preview": "qwen2.5-32b",
    "zai-org/GLM-4.5-Air": "glm-4.5-air",
    "Kimi K2": "kimi-k2",
    "Qwen3-4B-Thinking-2507": "qwen3-4b-2507",
    "Qwen/Qwen3-30B-A3B-Thinking-2507": "qwen3-30b-a3b-2507",
    "Qwen3-Coder-30B-A3B-Instruct": "qwen3-30b-a3b-2507",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "Llama 3.1 8B": "llama-3.1-8b",
    "llama3.1:70b": "llama-3.1-70b",
    "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit": "llama-3.1-8b",
    "Llama-3.3-70B-Instruct": "llama-3.1-70b",
    "NousResearch/Meta-Llama-3-8B-Instruct": "llama-3-8b",
    "allenai/Llama-3.1-Tulu-3-8B-DPO": "tulu-3-8b",
    "NousResearch/Hermes-3-Llama-3.1-8B": "llama-3.1-8b",
    "Llama-3.1-Nemotron-70B-Instruct": "llama-3.1-70b",
    "HuggingFaceH4/zephyr-7b-beta": "mistral-7b-v0.1",
    "Mistral-7B-Instruct-v0.2": "mistral-7b-v0.2",
    "mistral-7b-instruct-v0.3": "mistral-7b",
    "Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b",
    "unsloth/gemma-2-9b-it": "gemma-2-9b",
    "gemma3-12b-it": "gemma-3-12b",
    "microsoft/Phi-3.5-mini-instruct": "phi-3-mini-128k",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "allenai/Olmo-3-7B-Think": "olmo-3-7b",
    "Olmo-3.1-32B-Instruct": "olmo-3-32b",
    "XiaomiMiMo/MiMo-7B-RL": "mimo-7b",
    "THUDM/glm-4-9b-chat": "glm-4-9b",
    "THUDM/GLM-4-32B-0414": "glm-4-32b",
    "arcee-ai/AFM-4.5B": "afm-4.5b",
    "moonshotai/Moonlight-16B-A3B-Instruct": "moonlight-16b-a3b",
    "deepseek-coder-6.7b-instruct": "deepseek-coder-6.7b",
    "deepseek-ai/deepseek-llm-7b-chat": "deepseek-llm-7b",
    "DeepSeek-Coder-V2-Lite-Instruct": "deepseek-v2-lite",
    "bigcode/starcoder2-15b": "starcoder2-15b",
    "bigcode/starcoder": "starcoder-15b",
    "StarCoderBase-7B": "starcoderbase-7b",
    "mistralai/Codestral-22B-v0.1": "codestral-22b",
    "Mistral-Large-Instruct-2407": "mistral-large-2407",
    "mistralai/Magistral-Small-2506": "mistral-small-24b",
    "Devstral-Small-2507": "mistral-small-24b",
    "microsoft/phi-2": "phi-2",
    "EleutherAI/pythia-6.9b": "pythia-6.9b",
    "c4ai-command-r-v01": "command-r-35b",
    "ibm-granite/granite-3.3-8b-instruct": "granite-3.3-8b",
    "LGAI-EXAONE/EXAONE-4.0-32B": "exaone-4-32b",
    "Qwen2-VL-7B-Instruct": "qwen2-vl-7b",
    "Qwen/Qwen3-VL-30B-A3B-Thinking": "qwen3-vl-30b-a3b",
    "deepseek r1 distill 32b": "qwen2.5-32b",
    "qwen3 coder 30b": "qwen3-30b-a3b-2507",
    "Qwen/Qwen3-Coder-Next": "qwen3-next-80b-a3b",
    "qwen3.6 27b": "qwen3.5-27b",
    "glm 4.6": "glm-4.5",
    "GLM-4.7-Flash": "glm-4.7-flash",
    "glm 5": "glm-5",
    "llama 4 scout": "llama-4-scout",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct": "llama-4-maverick",
    "nemotron nano 9b v2": "nemotron-nano-9b-v2",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "nemotron-3-nano-30b-a3b",
    "granite 4 h small": "granite-4-h-small",
    "ibm-granite/granite-4.0-h-tiny": "granite-4-h-tiny",
    "falcon h1 7b": "falcon-h1-7b",
    "minimax m2": "minimax-m2",
    "hunyuan a13b": "hunyuan-a13b",
    "tencent/Hunyuan-7B-Instruct": "hunyuan-7b",
    "ernie 4.5 21b": "ernie-4.5-21b-a3b",
    "apertus 8b": "apertus-8b",
    "phi 4 reasoning": "phi-4",
    "mistral small 3.2": "mistral-small-3.2-24b",
    "ministral 3 8b": "ministral-3-8b",
    "devstral": "mistral-small-24b",
    "magistral": "mistral-small-24b",
    "qwq": "qwen2.5-32b",
    "hermes 3": "llama-3.1-8b",
    "zephyr": "mistral-7b-v0.1",
    "vicuna 13b": "llama-2-13b",
    "internlm3 8b": "internlm3-8b",
    "facebook/opt-1.3b": "opt-1.3b",
    "gpt2": "gpt2",
    "stablelm 2 1.6b": "stablelm-2-1.6b",
    "kimi k2 thinking": "kimi-k2",
    "exaone 4 1.2b": "exaone-4-1.2b",
    "gemma 3 270m": "gemma-3-270m",
    "EleutherAI/pythia-1.4b-deduped": "pythia-1.4b",
    "openchat 3.5": "openhermes-2.5-mistral-7b",
    "codellama 13b": "codellama-13b",
    "command r7b": "command-r7b",
    "deepseek v2.5": "deepseek-v2",
    "Qwen3-Next-80B-A3B-Thinking": "qwen3-next-80b-a3b",
    "Starling-LM-7B-beta": "openhermes-2.5-mistral-7b",
    "Skywork-Reward-Llama-3.1-8B-v0.2": "llama-3.1-8b",
    "Skywork/Skywork-Reward-V2-Qwen3-8B": "qwen3-8b",
    "Qwen/Qwen2-Math-7B-Instruct": "qwen2-7b",
    "Qwen/QVQ-72B-Preview": "qwen2-vl-72b",
    "google/gemma-1.1-7b-it": "gemma-7b",
    "llemma 7b": "codellama-7b",
    "peiyi9979/math-shepherd-mistral-7b-prm": "mistral-7b-v0.1",
    "vicuna-33b-v1.3": "llama-30b",
    "shenzhi-wang/Llama3-8B-Chinese-Chat": "llama-3-8b",
    "mistral-small-instruct-2409": "codestral-22b",
    "deepseek-ai/DeepSeek-Prover-V2-7B": "deepseek-llm-7b",
    "aya-23-35b": "command-r-35b",
    "CohereForAI/aya-vision-8b": "aya-vision-8b",
    "unsloth/gpt-oss-20b-BF16": "gpt-oss-20b",
    "qwen2.5vl:7b": "qwen2.5-vl-7b",
    "unsloth/gemma-4-E4B-it": "gemma-4-e4b",
    "LiquidAI/LFM2.5-1.2B-Instruct": "lfm2-1.2b",
    "lfm2 8b": "lfm2-8b-a1b",
    "OpenGVLab/InternVL3_5-8B-HF": "internvl3.5-8b",
    "internvl3.5 38b": "internvl3.5-38b",
    "deepseek-r1:8b": "qwen3-8b",
    "arcee-ai/Trinity-Mini": "trinity-mini",
    "trinity nano preview": "trinity-nano",
    "LGAI-EXAONE/K-EXAONE-236B-A23B": "k-exaone",
    "arcee-ai/Trinity-Large-Preview": "trinity-large",
    "deepseek-r1:7b": "qwen2.5-7b",
    "deepseek-r1:671b": "deepseek-v3",
    "ds-r1-distill-qwen-7b": "qwen2.5-7b",
    "kimi-k2:1t": "kimi-k2",
    "granite4:small-h": "granite-4-h-small",
    "huihui-ai/Huihui-Qwen3.5-27B-abliterated": "qwen3.5-27b",
    "huihui-ai/Huihui-gpt-oss-20b-BF16-abliterated-v2": "gpt-oss-20b",
    "p-e-w/gpt-oss-20b-heretic": "gpt-oss-20b",
    "huihui-ai/Qwen3-8B-abliterated": "qwen3-8b",
    "google/gemma-3-27b-it-qat-q4_0-unquantized": "gemma-3-27b",
    "google/gemma-3-27b-it-qat-q4_0-gguf": "gemma-3-27b",
    "mistral small 3.1 24b": "mistral-small-3.2-24b",
    "PaddlePaddle/PaddleOCR-VL": "paddleocr-vl",
    "PaddleOCR-VL-1.5": "paddleocr-vl",
    "zai-org/GLM-OCR": "glm-ocr",
    "lightonai/LightOnOCR-2-1B": "lightonocr-2-1b",
    "lightonai/LightOnOCR-3-1B": "",
    "ibm-granite/granite-docling-258M": "granite-docling-258m",
    "ds4sd/SmolDocling-256M-preview": "smolvlm2-256m",
    "Salesforce/codegen-350M-mono": "codegen-350m",
    "codegen-2B-multi": "codegen-2b",
    "Salesforce/codegen-6B-mono": "",
    "microsoft/Phi-4-reasoning-vision-15B": "phi-4",
    "internlm2-math-plus-20b": "internlm2.5-20b",
    "llama3.1-typhoon2-8b-instruct": "llama-3.1-8b",
    "Tower-Plus-9B": "gemma-2-9b",
    "gemma-3-27b-it-qat": "gemma-3-27b",
    "Menlo/Jan-nano": "qwen3-4b",
    "Goedel-Prover-V2-32B": "qwen3-32b",
    "zai-org/GLM-4.5V": "glm-4.5v",
    "glm 4.6v": "glm-4.5v",
    "zai-org/GLM-4.6V-Flash": "glm-4.1v-9b",
    "THUDM/GLM-4.1V-9B-Thinking": "glm-4.1v-9b",
    "gemma 4 31b": "gemma-4-31b",
    "google/gemma-4-26B-A4B-it": "gemma-4-26b-a4b",
    "meta-llama/Llama-3.2-11B-Vision": "llama-3.2-11b-vision",
    "Qwen/Qwen2.5-Omni-7B": "qwen2.5-omni-7b",
    "Qwen3-Omni-30B-A3B-Captioner": "qwen3-omni-30b-a3b",
    "Qwen/Qwen3-VL-Reranker-2B": "qwen3-vl-2b",
    "deepseek-ai/DeepSeek-V3.2": "deepseek-v3.2",
    "HuggingFaceTB/SmolVLM-500M-Instruct": "smolvlm2-500m",
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": "smolvlm2-2.2b",
    "HuggingFaceTB/SmolVLM-Instruct": "smolvlm-2.2b",
    "WizardLM/WizardCoder-15B-V1.0": "wizardcoder-15b",
    "HuggingFaceM4/Idefics3-8B-Llama3": "idefics3-8b",
    "mistralai/Mixtral-8x22B-Instruct-v0.1": "mixtral-8x22b-instruct",
    "mistral-community/Mixtral-8x22B-v0.1": "mixtral-8x22b",
    "Mixtral-8x22B-Instruct-v0.1-AWQ": "mixtral-8x22b-instruct",
    "01-ai/Yi-34B-200K": "yi-34b-200k",
    "zai-org/chatglm3-6b-128k": "chatglm3-6b",
    "OpenGVLab/InternVL3_5-8B-MPO": "internvl3.5-8b",
    "OpenGVLab/InternVL3-14B-Pretrained": "internvl3-14b",
    "ibm-granite/granite-4.1-8b": "granite-4.1-8b",
    "granite 4.2 3b": "granite-4.2-3b",
    "ibm-granite/granite-4.2-8b": "granite-4.1-8b",
    "unsloth/granite-4.0-350m-base-unsloth-bnb-4bit": "granite-4-350m",
    "granite-4.0-h-1b": "granite-4-h-1b",
    "CohereLabs/tiny-aya-water": "tiny-aya",
    "nvidia/Mistral-NeMo-Minitron-8B-Instruct": "minitron-8b",
    "distilgpt2": "distilgpt2",
    "google/translategemma-12b-it": "gemma-3-12b",
    "deepseek-ai/DeepSeek-Math-V2": "deepseek-v3.2",
    "ISTA-DASLab/gemma-3-27b-it-GPTQ-4b-128g": "gemma-3-27b",
    "deepseek": "deepseek-v3",
    "kimi": "kimi-k2",
    "glm air": "glm-4.5-air",
    "google/paligemma2-3b-mix-448": "paligemma2-3b-448",
    "google/paligemma-3b-pt-896": "",
    "Qwen3 VL 235B": "qwen3-vl-235b-a22b",
    "qwen3-next-80b": "qwen3-next-80b-a3b",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral-small-3.2-24b",
    "Qwen/Qwen3-32B-FP8": "qwen3-32b",
    "Qwen2.5-7B-Instruct-GPTQ-Int4": "qwen2.5-7b",
    "gaunernst/gemma-3-27b-it-qat-compressed-tensors": "gemma-3-27b",
    "lmstudio-community/gpt-oss-20b-MXFP4": "gpt-oss-20b",
    "cpatonn/Qwen3-30B-A3B-Instruct-2507-AWQ-4bit": "qwen3-30b-a3b-2507",
    "amazon/MegaBeam-Mistral-7B-512k": "mistral-7b-v0.2",
    "command r+": "command-r-plus-104b",
    "allenai/FlexOlmo-7x7B-1T": "flexolmo-7x7b",
    "LGAI-EXAONE/EXAONE-Deep-7.8B": "exaone-3.5-7.8b",
    "Llama-2-7b-instruct-tuned": "llama-2-7b",
    "zai-org/GLM-5.2": "glm-5.2",
    "tencent/Hy3-preview": "hy3",
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16": "nemotron-3-ultra-550b-a55b",
    "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16": "nemotron-3-nano-30b-a3b",
    "mistralai/Mistral-Small-4-119B-2603": "mistral-small-4-119b",
    "moonshotai/Kimi-K2.7-Code": "kimi-k2.5",
    "Qwen/Qwen-AgentWorld-35B-A3B": "qwen3.5-35b-a3b",
    "qwen3 moe 30b": "qwen3-30b-a3b",
    "tencent/Youtu-LLM-2B-Base": "youtu-llm-2b",
    "MiniMaxAI/MiniMax-M3": "",
    "deepseek-ai/DeepSeek-V4-Flash": "deepseek-v4-flash",
    "nvidia/DeepSeek-V4-Pro-NVFP4": "deepseek-v4-pro",
    "deepseek-ai/DeepSeek-V4.1-Flash": "",
    "microsoft/Phi-3-medium-128k-instruct": "phi-3-medium-128k",
    "01-ai/Yi-6B-Chat-8bits": "yi-6b",
    "tiiuae/Falcon-H1-1.5B-Deep-Instruct": "falcon-h1-1.5b-deep",
    "tiiuae/falcon-11B": "falcon-2-11b",
    "falcon2 11b": "falcon-2-11b",
    "tiiuae/falcon-7b-instruct": "falcon-7b",
    "falcon-rw-1b": "",
    "EleutherAI/gpt-j-6B": "gpt-j-6b",
    "gpt-j": "gpt-j-6b",
    "xiaomi mimo 7b": "mimo-7b",
    "google gemma 3 4b": "gemma-3-4b",
    "Microsoft Phi-4": "phi-4",
    "nvidia nemotron nano 9b v2": "nemotron-nano-9b-v2",
    "ibm granite 3.3 8b": "granite-3.3-8b",
    "pixtral": "pixtral-12b",
    "EleutherAI/gpt-neo-2.7B": "gpt-neo-2.7b",
    "gpt-neo-125M": "gpt-neo-125m",
    "Qwen/Qwen-7B-Chat": "qwen1.5-7b",
    "Qwen-1_8B-Chat": "qwen1.5-1.8b",
    "Qwen-14B": "qwen1.5-14b",
    "qwen-72b-chat": "qwen1.5-72b",
    "openbmb/MiniCPM3-4B": "minicpm3-4b",
    "openbmb/MiniCPM4-8B": "minicpm4-8b",
    "openbmb/MiniCPM4.1-8B": "",
    "openbmb/MiniCPM-2B-sft-bf16": "minicpm-2b",
    "canopylabs/orpheus-3b-0.1-ft": "orpheus-3b",
    "unsloth/embeddinggemma-300m": "embeddinggemma-300m",
    "QVQ-72B": "qwen2-vl-72b",
    "openhermes": "openhermes-2.5-mistral-7b",
    "nvidia/DeepSeek-R1-0528-NVFP4-v2": "deepseek-v3",
    "XiaomiMiMo/MiMo-VL-7B-SFT-2508": "mimo-vl-7b",
    "mimo-vl-7b-rl": "mimo-vl-7b",
    "mimo-vl": "mimo-vl-7b",
    "Qwen3-Omni": "qwen3-omni-30b-a3b",
    "Qwen/CodeQwen1.5-7B-Chat": "codeqwen1.5-7b",
    "databricks/dolly-v2-12b": "dolly-v2-12b",
    "ibm-granite/granite-3.1-3b-a800m-instruct": "granite-3.1-3b-a800m",
    "ibm-granite/granite-3.0-1b-a400m-base": "",
    "OpenGVLab/InternVL2_5-8B-MPO": "internvl2.5-8b",
    "OpenGVLab/InternVL2-26B": "internvl2.5-26b",
    "OpenGVLab/InternVL2_5-4B": "internvl2.5-4b",
    "InternVL2.5-1B": "internvl3-1b",
    "internvl2-2b": "internvl2.5-2b",
    "OpenGVLab/InternVL2-1B": "internvl2-1b",
    "OpenGVLab/InternVL2-40B": "yi-34b",
    "CohereLabs/aya-vision-32b": "command-r-32b",
    "AIDC-AI/Ovis2-16B": "qwen2.5-14b",
    "deepseek-ai/deepseek-vl2-small": "deepseek-v2-lite",
    "deepseek-ai/deepseek-vl2": "",
    "deepseek-ai/DeepSeek-OCR-2": "deepseek-ocr",
    "vikhyatk/moondream2": "phi-1.5",
    "utter-project/EuroLLM-1.7B-Instruct": "eurollm-1.7b",
    "openGPT-X/Teuken-7B-instruct-research-v0.4": "teuken-7b",
    "hfl/chinese-alpaca-2-13b-16k": "chinese-alpaca-2-13b",
    "TheDrummer/Cydonia-24B-v4": "mistral-small-3.2-24b",
    "jinaai/jina-embeddings-v4": "qwen2.5-3b",
    "Jamba-1.5-Mini-AWQ": "jamba-v0.1",
    "Alibaba-NLP/gte-Qwen2-1.5B-instruct": "qwen2-1.5b",
    "ai21labs/AI21-Jamba-1.5-Mini": "jamba-v0.1",
    "state-spaces/mamba-2.8b-hf": "mamba-2.8b",
    "tiiuae/falcon-mamba-7b-instruct-4bit": "falcon-mamba-7b",
    "ai21labs/AI21-Jamba-Large-1.7": "jamba-large",
    "jamba reasoning 3b": "jamba-reasoning-3b",
    "llava-hf/LLaVA-NeXT-Video-7B-32K-hf": "mistral-7b-v0.2",
    "LGAI-EXAONE/EXAONE-4.5-33B": "exaone-4-32b",
    "openbmb/MiniCPM-V-4.6": "qwen3.5-0.8b",
    "openbmb/MiniCPM4-0.5B": "minicpm4-0.5b",
    "openbmb/MiniCPM5-1B-SFT": "minicpm5-1b",
    "nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16": "nemotron-3-nano-4b",
    "m42-health/Llama3-Med42-70B": "llama-3-70b",
    "deepseek-ai/DeepSeek-V4-Flash-0731": "deepseek-v4-flash",
    "tiiuae/falcon-11B-vlm": "",
    "Qwen/Qwen3-Reranker-8B": "qwen3-reranker-8b",
    "Qwen/Qwen3-Embedding-4B": "qwen3-embedding-4b",
    "DeepSeekMath 7B RL": "deepseek-llm-7b",
    "opengvlab internvl3 78b": "internvl3-78b",
    "command-r7b-12-2024": "command-r7b",
    "TIGER-Lab/General-Reasoner-Qwen2.5-14B": "qwen2.5-14b",
    "Qwen-2.5-7B-SimpleRL-Zoo": "qwen2.5-7b",
    "cognitivecomputations/dolphin-2.9.1-llama-3-70b": "llama-3-70b",
    "Qwen2.5-Math-PRM-7B": "",
    "someone/Llama-3.1-8B-pruned-depth": "",
    "nvidia/Nemotron-4-340B-Instruct": "nemotron-4-340b",
    "Salesforce/codegen25-7b-multi": "codegen2.5-7b",
    "granite-20b-code-instruct": "granite-20b-code",
    "Nous-Hermes-2-Mixtral-8x7B-DPO": "nous-hermes-2-mixtral-8x7b",
    "nvidia/Llama-3.1-Minitron-4B-Width-Base": "llama-3.1-minitron-4b-width",
    "Nous-Capybara-34B": "yi-34b-200k",
    "deepseek-moe-16b-chat": "deepseek-moe-16b",
    "openbmb/MiniCPM-V-2_6": "minicpm-v-2.6",
    "MiniCPM-V 4.5": "minicpm-v-4.5",
    "openbmb/MiniCPM-V-4": "",
    "microsoft/Phi-3.5-vision-instruct": "phi-3.5-vision",
    "phi 3 vision 128k": "phi-3.5-vision",
    "moonshotai/Kimi-VL-A3B-Instruct": "kimi-vl-a3b",
    "Kimi-VL-A3B-Thinking-2506": "kimi-vl-a3b",
    "kimi vl": "kimi-vl-a3b",
    "inclusionAI/Ling-lite-1.5": "ling-lite-1.5",
    "Ring-lite": "ling-lite-1.5",
    "inclusionAI/Ling-lite": "",
    "nvidia/Llama-3_3-Nemotron-Super-49B-v1_5": "nemotron-super-49b",
    "Llama-3.3-Nemotron-Super-49B-v1.5": "nemotron-super-49b",
    "nemotron super 49b": "nemotron-super-49b",
    "nvidia/Llama-3_1-Nemotron-Ultra-253B-v1": "nemotron-ultra-253b",
    "tokyotech-llm/Llama-3.1-Swallow-8B-Instruct-v0.3": "llama-3.1-8b",
    "elyza/ELYZA-japanese-Llama-2-7b": "llama-2-7b",
    "Qwen/Qwen3-VL-Embedding-2B": "qwen3-vl-2b",
    "Qwen/Qwen3-VL-Reranker-8B": "qwen3-vl-8b",
    "Kwaipilot/KAT-Dev-32B": "qwen3-32b",
    "QWEN3_8B": "qwen3-8b",
    "Llama_3.2_3B_Instruct": "llama-3.2-3b",
    "jinaai/ReaderLM-v2": "qwen2.5-1.5b",
    "katanemo/Arch-Router-1.5B": "qwen2.5-1.5b",
    "Salesforce/SFR-Embedding-Mistral": "mistral-7b-v0.1",
    "BAAI/bge-multilingual-gemma2": "gemma-2-9b",
    "Gryphe/MythoMax-L2-13b": "llama-2-13b",
    "OpenRLHF/Llama-3-8b-rm-700k": "llama-3-8b",
    "m42-health/Llama3-Med42-8B": "llama-3-8b",
    "hfl/chinese-mixtral": "mixtral-8x7b",
    "microsoft/Phi-4-multimodal-instruct": "phi-4-mini",
    "AIDC-AI/Ovis2.5-9B": "qwen3-8b",
    "Kwai-Keye/Keye-VL-8B-Preview": "qwen3-8b",
    "lmms-lab/LLaVA-OneVision-1.5-8B-Instruct": "qwen3-8b",
    "nvidia/NVIDIA-Nemotron-Nano-12B-v2-VL-BF16": "nemotron-nano-12b-v2",
    "CohereLabs/command-a-vision-07-2025": "command-a",
    "meta-llama/Llama-3.2-90B-Vision-Instruct": "llama-3.2-90b-vision",
    "elyza/ELYZA-japanese-Llama-2-7b-fast": "",
    "hfl/chinese-alpaca-2-7b": "chinese-alpaca-2-7b",
    "t-tech/T-pro-it-2.0": "qwen3-32b",
    "FreedomIntelligence/HuatuoGPT-o1-8B": "llama-3.1-8b",
    "TheDrummer/Rocinante-12B-v1.1": "mistral-nemo-12b",
    "mlabonne/NeuralBeagle14-7B": "mistral-7b-v0.1",
    "OpenPipe/mistral-ft-optimized-1227": "mistral-7b-v0.1",
    "SakanaAI/TinySwallow-1.5B-Instruct": "qwen2.5-1.5b",
    "katanemo/Arch-Function-3B": "qwen2.5-3b",
    "tiiuae/Falcon3-Mamba-7B-Instruct": "falcon-mamba-7b",
    "CYFRAGOVPL/Llama-PLLuM-8B-instruct": "llama-3.1-8b",
    "CYFRAGOVPL/PLLuM-12B-chat": "mistral-nemo-12b",
    "speakleash/Bielik-4.5B-v3.0-Instruct": "bielik-4.5b",
    "Bielik-1.5B-v3.0-Instruct-AWQ": "bielik-1.5b",
    "skt/A.X-3.1-Light": "a.x-3.1-light",
    "skt/A.X-4.0-Light": "a.x-4.0-light",
    "utter-project/EuroLLM-22B-Instruct-2512": "eurollm-22b",
    "sarvamai/sarvam-1": "sarvam-1",
    "h2oai/h2o-danube3-4b-chat": "h2o-danube3-4b",
    "kakaocorp/kanana-1.5-8b-instruct-2505": "kanana-1.5-8b",
    "meta-llama/Llama-Guard-4-12B": "llama-guard-4-12b",
    "llama guard 4": "llama-guard-4-12b",
    "poolside/Laguna-XS.2": "laguna-xs.2",
    "laguna xs 2.1": "laguna-xs-2.1",
    "poolside/Laguna-S-2.1": "",
    "m-a-p/OpenCodeInterpreter-DS-6.7B": "deepseek-coder-6.7b",
}


@pytest.mark.parametrize("name", [typed for typed, id in TYPED.items() if id])
def test_a_name_that_people_type_leads_to_the_model_with_its_shapes(name: str) -> None:
    assert load().model(name).id == TYPED[name]


@pytest.mark.parametrize("name", [typed for typed, id in TYPED.items() if not id])
def test_what_only_looks_alike_is_refused(name: str) -> None:
    with pytest.raises(CatalogError, match=r"^model: given '"):
        load().model(name)


def test_more_than_a_hundred_names_are_tried() -> None:
    assert len(TYPED) == 422


def test_a_name_that_is_listed_as_unlike_is_told_why() -> None:
    """However it is spelled; and the model that it looks like is still found."""
    catalog = load()
    with pytest.raises(CatalogError) as caught:
        catalog.model("unsloth/nemotron-3-nano-omni-30b-a3b-reasoning")
    assert str(caught.value) == (
        "model: given 'unsloth/nemotron-3-nano-omni-30b-a3b-reasoning', not nemotron-3-nano-30b-a3b: it reads images "
        "and sound, too, which is not modelled; its language model is of the build of nemotron-3-nano-30b-a3b; "
        "allowed: a path to its config.json, or another model"
    )
    for model in catalog.models.values():
        assert catalog.model(model.hf.partition("/")[2]) is catalog.model(model.name) is model
        for name in model.unlike:
            with pytest.raises(CatalogError, match=f"not {model.id}: "):
                catalog.model(name)


@pytest.mark.parametrize(
    ("name", "form", "id"),
    [
        ("Qwen/Qwen3-32B-FP8", "FP8", "qwen3-32b"),
        ("Qwen/QwQ-32B-AWQ", "AWQ", "qwen2.5-32b"),
        ("hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4", "AWQ INT4", "llama-3.1-70b"),
        ("unsloth/DeepSeek-R1-0528-Qwen3-8B-GGUF", "GGUF", "qwen3-8b"),
        ("Qwen3.5-35B-A3B-UD-Q4_K_XL", "Q4_K_XL", "qwen3.5-35b-a3b"),
        ("Llama-3.3-70B-Instruct-quantized.w4a16", "W4A16", "llama-3.1-70b"),
        ("mlx-community/gemma-3-4b-it-8bit", "8BIT", "gemma-3-4b"),
    ],
)
def test_a_checkpoint_of_quantised_weights_is_the_model_that_it_was_made_of(name: str, form: str, id: str) -> None:
    """To train; where weights are only read, they are of other types and sizes, and it is refused."""
    assert load().model(name).id == id
    refused = (
        f"model: given {name!r}, not {id}: its weights are stored as {form}, which is not modelled; allowed: another "
        f"model; did you mean {id!r}?"
    )
    job = {"model": name, "task": "sft", "gpu": "h200", "gpus": 8, "seq_len": 512}
    dequantised = f"the checkpoint's weights are stored as {form}: computed from weights that were dequantised to bf16"
    assert dequantised in parse(job).warnings
    assert parse({**job, "framework": "trl", "method": "lora"}).method == ("qlora" if adapted(form) else "lora")
    for read in ({**job, "task": "inference"}, {**job, "task": "dpo", "roles.reference.model": name, "model": id}):
        with pytest.raises(ScenarioError) as caught:
            parse(read)
        assert refused in str(caught.value).replace("roles.reference.", "")


def test_an_adapter_beside_the_four_bits_of_awq_is_computed_as_qlora() -> None:
    """PEFT leaves the stored weights as they are; bitsandbytes' take as much to a percent."""
    job = {"task": "sft", "gpu": "h200", "framework": "trl", "seq_len": 512}
    stored = parse({**job, "model": "Qwen/Qwen2.5-7B-Instruct-AWQ", "method": "lora"})
    four_bits = parse({**job, "model": "qwen2.5-7b", "method": "qlora"})
    assert "an adapter beside weights stored as AWQ is computed as QLoRA, whose 4 bits take nearly as much" in (
        stored.warnings
    )
    assert replace(stored, warnings=()) == replace(four_bits, warnings=())
    with pytest.raises(ScenarioError, match=r"method: given 'qlora', allowed with verl"):
        parse({**job, "model": "Qwen/Qwen2.5-7B-Instruct-AWQ", "method": "lora", "framework": "verl"})


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("yi-1.5", ["yi-6b", "yi-9b", "yi-34b"]),
        ("gemma 3", ["gemma-3-270m", "gemma-3-1b", "gemma-3-4b", "gemma-3-12b", "gemma-3-27b"]),
        ("LFM2", ["lfm2-350m", "lfm2-700m", "lfm2-1.2b", "lfm2-2.6b", "lfm2-8b-a1b"]),
        ("ernie 4.5", ["ernie-4.5-0.3b", "ernie-4.5-21b-a3b", "ernie-4.5-300b-a47b"]),
    ],
)
def test_a_family_named_without_a_size_leads_to_each_of_its_sizes(name: str, ids: list[str]) -> None:
    with pytest.raises(CatalogError) as caught:
        load().model(name)
    assert str(caught.value).endswith(f"; did you mean {', '.join(map(repr, ids))}?")


def test_a_quantised_checkpoint_of_an_unknown_model_is_unknown() -> None:
    with pytest.raises(CatalogError, match="given 'Lama-9-8B-AWQ', allowed: an id"):
        load().model("Lama-9-8B-AWQ")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("moonshotai/Kimi-K3", "has layers of a kind that is not modelled"),
        ("inclusionAI/Ling-plus", "is of a BailingMoE that is not modelled"),
        ("inclusionAI/Ring-linear-2.0", "has lightning attention in most layers"),
        ("inclusionAI/Ring-flash-linear-2.0", "has lightning attention in most layers"),
        ("inclusionAI/Ling-3.0-Flash", "has layers of a kind that is not modelled"),
        ("state-spaces/mamba2-2.7b", "has a state space or recurrence of another kind"),
        ("baichuan-inc/Baichuan2-13B-Chat", "slopes attention's scores"),
        ("llava-hf/llava-interleave-qwen-7b-hf", "reads images"),
        ("openai/whisper-large-v3", "hears or speaks"),
        ("google/flan-t5-xl", "has an encoder beside"),
        ("ByteDance/Ouro-2.6B", "runs its layers several times over"),
        ("ServiceNow-AI/Apriel-5B-Instruct", "is of the family of apriel-1.6-15b"),
        ("microsoft/Phi-3-small-8k-instruct", "has attention by blocks"),
        ("bigcode/santacoder", "is of an architecture that few train today"),
        ("meituan-longcat/LongCat-Flash-Chat", "has two attentions in a layer"),
        ("answerdotai/ModernBERT-base", "is an encoder"),
        ("sentence-transformers/all-MiniLM-L6-v2", "is an encoder"),
        ("meta-llama/Llama-Prompt-Guard-2-86M", "is an encoder"),
        ("intfloat/multilingual-e5-large", "is an encoder"),
        ("nvidia/Nemotron-Flash-1B", "has a state space or recurrence of another kind"),
        ("tiiuae/Falcon-E-3B-Base", "has weights of three values"),
        ("kakaocorp/kanana-nano-2.1b-instruct", "is of the family of kanana-1.5-8b"),
        ("skt/A.X-4.0", "is of the family of a.x-3.1-light"),
    ],
)
def test_a_model_that_is_not_modelled_is_refused_with_what_it_has(name: str, why: str) -> None:
    with pytest.raises(CatalogError, match=rf"^model: given '{name}', which {why}.*; allowed: a path to its config"):
        load().model(name)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("LiquidAI/LFM2-VL-1.6B", "lfm2-1.2b"),
        ("LiquidAI/LFM2.5-VL-1.6B", "lfm2-1.2b"),
        ("allenai/Molmo-7B-D-0924", "qwen2-7b"),
        ("internlm/Intern-S1-mini", "qwen3-8b"),
        ("OpenGVLab/InternVL3_5-241B-A28B", "qwen3-235b-a22b"),
    ],
)
def test_a_model_whose_part_for_images_is_not_modelled_is_its_language_model_and_says_so(name: str, known: str) -> None:
    """A job of text has an answer with a warning, one of images none; the Chinese page says so, too."""
    job = {"model": name, "task": "sft", "gpu": "h100-sxm", "seq_len": 4096}
    scenario = parse(job)
    why = f"{name} reads images by a part that is not modelled: computed as its language model alone, over text"
    assert (scenario.model, why in scenario.warnings) == (known, True)
    assert "这一部分不在计算范围内" in say(why, "zh")
    with pytest.raises(ScenarioError, match="images: given for a model whose part for images is not modelled"):
        parse(job | {"images": {"width": 448, "height": 448}})


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("facebook/galactica-6.7b", "opt-6.7b"),
        ("tencent/Hunyuan-MT-7B", "hunyuan-7b"),
        ("TIGER-Lab/MAmmoTH2-8B", "llama-3-8b"),
        ("epfl-llm/meditron-7b", "llama-2-7b"),
        ("nvidia/OpenMath-Nemotron-1.5B", "qwen2.5-1.5b"),
        ("nvidia/Llama-3_1-Nemotron-51B-Instruct", "nemotron-super-49b"),
        ("DAMO-NLP-SG/VideoLLaMA3-7B", "qwen3-vl-8b"),
        ("GSAI-ML/LLaDA-8B-Instruct", "llama-3-8b"),
        ("moonshotai/Kimi-Audio-7B-Instruct", "qwen2-audio-7b"),
        ("google/flan-t5-xl", "qwen3-0.6b"),
        ("CohereForAI/aya-101", "qwen3-0.6b"),
        ("adept/fuyu-8b", "gpt2"),
        ("ByteDance/Ouro-1.4B-Thinking", "smollm3-3b"),
        ("internlm/internlm-7b", "qwen3-8b"),
    ],
)
def test_a_refused_name_is_told_of_a_model_that_is_modelled(name: str, near: str) -> None:
    """In both languages of the calculator."""
    catalog = load()
    with pytest.raises(CatalogError) as caught:
        catalog.model(name)
    assert near in catalog.models
    for said in (str(caught.value), say(str(caught.value), "zh")):
        assert near in said
    assert say(str(caught.value), "zh") != str(caught.value)


def test_no_two_models_are_spelled_alike() -> None:
    """A name that could be either model's is none."""
    catalog = load()
    said = [(n, m.id) for m in catalog.models.values() for n in (m.id, m.name, m.hf, *m.aliases)]
    assert len({(words(n), id) for n, id in said}) == len({words(n) for n, _ in said})
    twins = {plain(n) for n, _ in said} - catalog.names.spelled.keys()
    assert twins <= {""}
    assert {id for n, id in said if plain(n) == "mixtral 8x 22b"} == {"mixtral-8x22b", "mixtral-8x22b-instruct"}
    twins = [catalog.models["qwen3-8b"], catalog.models["llama-3-8b"]]
    assert "qwen 3 8b" in names(twins[:1]).spelled
    assert "qwen 3 8b" not in names([*twins, type(twins[0])(**{**fields(twins[1]), "name": "Qwen3 8B"})]).spelled


def fields(model: object) -> dict[str, object]:
    return {name: getattr(model, name) for name in model.__dataclass_fields__}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "said", "shapes"),
    [
        ("org/Qwen2.5-7B-Instruct-1M", "qwen 2.5 7b instruct 1m", "qwen 2.5 7b"),
        ("Mixtral-8x7B", "mixtral 8x 7b", "mixtral 8x 7b"),
        ("unsloth/Llama3.1-8B-bnb-4bit", "llama 3.1 8b bnb 4bit", "llama 3.1 8b"),
        ("granite-3.1-8b-base", "granite 3.1 8b base", "granite 3.1 8b base"),  # with a smaller vocabulary
        ("qwen2.5vl-7b", "qwen 2.5 vl 7b", "qwen 2.5 vl 7b"),
        ("unsloth/gpt-oss-20b-BF16", "gpt oss 20b bf16", "gpt oss 20b"),
        ("instruct", "instruct", ""),
        ("Yi-1.5-9B-Chat-16K", "yi 1.5 9b chat 16k", "yi 1.5 9b"),
    ],
)
def test_words_of_a_name(name: str, said: str, shapes: str) -> None:
    assert (words(name), plain(name)) == (said, shapes)


def test_a_path_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder named like a model has a config of its own, and one that is not there is not found."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Qwen2.5-7B-it").mkdir()
    config = {**load().models["llama-3-8b"].config}
    (tmp_path / "Qwen2.5-7B-it" / "config.json").write_text(json.dumps(config))
    assert load().model("./Qwen2.5-7B-it").architecture == load().models["llama-3-8b"].architecture
    assert load().model("Qwen2.5-7B-it").architecture == load().models["llama-3-8b"].architecture
    for name in ("./Qwen3-8B", "/data/models/Qwen3-8B", "checkpoints/tuned/Qwen3-8B", ""):
        with pytest.raises(CatalogError):
            load().model(name)


def test_a_name_with_anothers_inside_is_computed_as_that_and_says_so() -> None:
    """A fine-tuned model's shapes are mostly those of the one that its name has inside, but nothing proves it."""
    job = {"task": "sft", "gpu": "h100-sxm"}
    (said,) = parse({"model": "General-Reasoner-Qwen2.5-14B", **job}).warnings
    assert said == "General-Reasoner-Qwen2.5-14B is not in the catalog: computed as qwen2.5-14b"
    assert "目录中没有" in say(said, "zh")
    for known in ("qwen2.5-14b", "DeepSeek-R1-Distill-Qwen-14B", "Qwen 2.5 14B Instruct"):
        assert not parse({"model": known, **job}).warnings


def test_models_that_make_no_text_say_which_task_is_nearest() -> None:
    """An embedding model is trained on hidden states, a reranker on the logits of two words."""
    job = {"gpu": "h100-sxm"}

    def said(model: str, task: str) -> tuple[str, ...]:
        return parse({"model": model, "task": task, **job}).warnings

    assert "task rm, also without one, is nearest" in said("qwen3-embedding-0.6b", "sft")[0]
    assert "task sft trains that" in said("qwen3-reranker-0.6b", "rm")[0]
    assert not said("qwen3-embedding-0.6b", "rm") + said("qwen3-reranker-0.6b", "sft")


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        # as its owner spells it, whichever way it is typed
        ("meta-llama/llama-3.3-70b-instruct", "meta-llama/Llama-3.3-70B-Instruct"),
        ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct"),
        ("DeepSeek-R1-Distill-Qwen-7B", "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"),
        ("Qwen 2.5 14B Instruct", "Qwen/Qwen2.5-14B-Instruct"),
        ("somebody/qwen2.5-14b-poems", "somebody/qwen2.5-14b-poems"),
        # the model's own: of its id, of a copy whose weights may not train, and where nobody's weights are named
        ("qwen2.5-14b", "Qwen/Qwen2.5-14B"),
        ("Qwen/Qwen2.5-14B-Instruct-AWQ", "Qwen/Qwen2.5-14B"),
        ("hermes-3-70b", "meta-llama/Llama-3.1-70B"),
    ],
)
def test_a_command_names_the_weights_that_were_asked_for(asked: str, named: str) -> None:
    """Once the command for Llama 3.3 70B Instruct trained Llama 3.1 70B, the catalog's model of these shapes."""
    assert load().checkpoint(asked) == named


def test_a_recommendation_says_which_weights_the_command_names(run: Callable[..., Run]) -> None:
    """A command that loads another model than was asked for must not pass unseen."""
    job = ("--task", "sft", "--gpu", "h100-sxm", "--gpus", "1", "--framework", "trl", "--method", "lora")
    asked = run("recommend", "--model", "DeepSeek-R1-Distill-Qwen-7B", *job).out
    hub = "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
    shapes = "has the shapes of qwen2.5-7b, as which it is computed"
    assert f"note: model DeepSeek-R1-Distill-Qwen-7B: {shapes}; a command names {hub}" in asked
    assert f"--model_name_or_path {hub} " in asked
    assert "has the shapes of" not in run("recommend", "--model", "Qwen/Qwen2.5-7B", *job).out


@given(st.sampled_from(("mistrel", "qwne", "instuct", "gemna", "lama", "coder", "xyz")), st.data())
def test_a_word_is_corrected_as_difflib_does(word: str, data: st.DataObject) -> None:
    """Pair by pair, as names share their words; difflib compares all words of each name anew."""
    words = ("mistral", "qwen", "instruct", "gemma", "llama", "coder", "code", "math", "chat", "ministral", "it")
    others = data.draw(st.lists(st.sampled_from(words), unique=True))
    close = get_close_matches(word, [other for other in others if len(other) >= 3], n=1)
    begun = [other for other in others if other.startswith(word)]
    assert misspelt(word, others) == next(iter(begun or close), "")
