"""Rules on models, and the fields that each family's config may have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from calc.base.project import ROOT
from calc.catalog.catalog import load
from calc.check import models
from calc.check.faults import Rule
from calc.models.config_keys import CARRIED, COMMON, known, known_around
from calc.models.families import FAMILIES, NESTED
from calc.models.hf_config import from_config


def said(rule: Rule[Any], id: str, change: Mapping[str, Any] | None = None, **fields: Any) -> list[str]:
    """The faults that the rule finds in a model with these fields, and with `change` in its config."""
    catalog = load()
    model = catalog.models[id]
    return list(rule(replace(model, config={**model.config, **(change or {})}, **fields), catalog))


# --- fields of a config ---


@pytest.mark.parametrize(
    ("field", "line"),
    [
        ("num_key_value_head", "unknown field 'config.num_key_value_head'; did you mean 'config.num_key_value_heads'?"),
        ("rms_norm_epsilon", "unknown field 'config.rms_norm_epsilon'; did you mean 'config.rms_norm_eps'?"),
        ("qk_rope_head_dim", "unknown field 'config.qk_rope_head_dim'"),  # of another family
    ],
)
def test_a_field_that_the_family_does_not_have_is_refused(field: str, line: str) -> None:
    config = {name: value for name, value in load().models["llama-3-8b"].config.items() if name not in line}
    model = replace(load().models["llama-3-8b"], config={**config, field: 1})
    found = list(models.config_fields(model, load()))
    assert len(found) == 1 and found[0].startswith(line)


def test_a_whole_config_json_can_be_pasted() -> None:
    """Those of the Hub have fields that say nothing on sizes."""
    published = {"bos_token_id": 128000, "use_cache": True, "transformers_version": "4.40.0.dev0", "pretraining_tp": 1}
    assert said(models.config_fields, "llama-3-8b", published) == []


def test_a_text_config_that_a_model_which_hears_leaves_out_is_its_family_s() -> None:
    """Voxtral's files may name no language model: it is Llama's. Once a KeyError."""
    catalog = load()
    config = {"model_type": "voxtral", "audio_config": {"model_type": "voxtral_encoder", "hidden_size": 1280},
              "text_config": {"hidden_size": 3072, "kernel": 1}}  # fmt: skip
    voxtral = replace(catalog.models["llama-3-8b"], config=config)
    voxtral = replace(voxtral, architecture=replace(voxtral.architecture, family="voxtral"))
    assert [line.partition(",")[0] for line in models.config_fields(voxtral, catalog)] == [
        "unknown field 'config.text_config.kernel'"
    ]


def test_a_published_count_with_the_vision_tower_is_that_of_its_tensors() -> None:
    model = load().models["gemma-3-4b"]
    assert list(models.published_count(model, load())) == []
    (line,) = models.published_count(replace(model, published_seeing=4_300_079_473), load())
    assert line == "vision.published_parameters: given 4300079473, allowed: 4300079472, as its config counts"


def test_fields_beside_and_inside_a_text_config() -> None:
    catalog = load()
    inner = {"model_type": "gemma3_text", **catalog.models["gemma-3-4b"].config}
    outer = {"model_type": "gemma3", "text_config": inner, "image_token_index": 262144}
    model = replace(catalog.models["gemma-3-4b"], config=outer)
    assert list(models.config_fields(model, catalog)) == []
    odd = replace(model, config={**outer, "hidden_size": 1, "text_config": {**inner, "hiden_size": 1}})
    first, second = models.config_fields(odd, catalog)
    assert first.startswith("unknown field 'config.hidden_size', allowed: ")
    assert second.startswith("unknown field 'config.text_config.hiden_size'")


class Reads(dict[str, Any]):
    """A config that remembers what it was asked for."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asked: set[str] = set()

    def __contains__(self, name: object) -> bool:
        self.asked.add(str(name))
        return super().__contains__(name)


def configs(family: str) -> Iterator[dict[str, Any]]:
    """Configs of a family that take the reader through its branches."""
    sizes = {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 128,
        "num_key_value_heads": 2, "num_kv_heads": 2, "num_experts_per_tok": 1, "model_type": family, "head_dim": 16,
        "kv_lora_rank": 8, "no_rope_layer_interval": 2, "n_embd": 64, "n_layer": 4, "n_head": 4, "ffn_dim": 64,
        "num_kv_shared_layers": 1, "d_model": 64, "n_layers": 4, "n_heads": 4, "n_routed_experts": 8,
        "rotary_dim": 16, "num_layers": 4, "num_heads": 4, "o_groups": 2,
        "block_configs": [{"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}] * 4,
    }  # fmt: skip
    needed = {name: True for name in FAMILIES[family].needed}
    for slides in (False, True):
        yield {**sizes, **needed, "sliding_window": 16 if slides else None, "use_sliding_window": slides}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_read_of_a_family_is_known(family: str) -> None:
    """A field that calc.models.hf_config reads is one that a file may have."""
    for config in configs(family):
        asked = Reads(config)
        from_config(asked)
        assert asked.asked - known(family) == set()


def test_each_row_is_of_a_family() -> None:
    """And repeats nothing that all have."""
    assert set(CARRIED) <= {*FAMILIES, *NESTED}
    for family, fields in CARRIED.items():
        assert len(set(fields)) == len(fields)
        assert not COMMON & set(fields), family
    assert known_around("gemma3") != known("gemma3_text")


# --- the rest ---


@pytest.mark.parametrize(
    ("rule", "name", "within", "beyond", "line"),
    [
        (
            models.named_class,
            "llama-3-8b",
            {"change": {"architectures": ["LlamaForSequenceClassification"]}},
            {"change": {"architectures": ["MistralForCausalLM"]}},
            "config.architectures: given a list, ['MistralForCausalLM'], allowed: a class of the family llama, as "
            "model_type says",
        ),
        (
            models.named_class,
            "llama-3-8b",
            {"change": {"architectures": ["LlamaForSequenceClassification"]}},
            {"change": {"architectures": ["LlamaForCasualLM"]}},
            "config.architectures: given a list, ['LlamaForCasualLM'], allowed: a class whose name ends in ForCausalLM "
            "or LMHeadModel or ForConditionalGeneration or ForSequenceClassification or ForTokenClassification",
        ),
        (
            models.one_dtype,
            "llama-3-8b",
            {"change": {"dtype": "bfloat16"}},
            {"change": {"dtype": "float32"}},
            "config.dtype: given 'float32', allowed: bfloat16, as torch_dtype, or one of the two",
        ),
        (
            models.positions,
            "qwen3-8b",
            {"change": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}},
            {"change": {"rope_scaling": {"rope_type": "yarn"}}},
            "missing field 'config.rope_scaling.factor', which rope_type yarn needs",
        ),
        (
            models.positions,
            "gpt-oss-20b",
            {},
            {"change": {"max_position_embeddings": 2048}},
            "config.rope_scaling.original_max_position_embeddings: given 4096, allowed: at most "
            "max_position_embeddings = 2048",
        ),
        (
            models.groups,
            "deepseek-v3",
            {"change": {"n_group": 16}},
            {"change": {"n_group": 7}},
            "config.n_group: given 7, allowed: a divisor of the number of experts, 256",
        ),
        (
            models.groups,
            "deepseek-v3",
            {"change": {"topk_group": 8}},
            {"change": {"topk_group": 9}},
            "config.topk_group: given 9, allowed: at most n_group = 8",
        ),
        (
            models.listed_layers,
            "qwen3-30b-a3b",
            {"change": {"mlp_only_layers": [47]}},
            {"change": {"mlp_only_layers": [48]}},
            "config.mlp_only_layers: given 48, allowed: 0 to 47, of num_hidden_layers = 48",
        ),
        (
            models.images,
            "qwen2.5-vl-7b",
            {"change": {"vision_config": {"spatial_merge_size": 2, "window_size": 112}}},
            {"change": {"vision_config": {"spatial_merg_size": 2, "window_size": 112}}},
            "unknown field 'config.vision_config.spatial_merg_size'; did you mean "
            "'config.vision_config.spatial_merge_size'?",
        ),
        (
            models.published_count,
            "llama-3-8b",
            {"published_parameters": None},
            {"published_parameters": 8_030_261_249},
            "published_parameters: given 8030261249, allowed: 8030261248, as its config counts, or null where nobody "
            "states it exactly",
        ),
        (
            models.size_in_name,
            "mixtral-8x7b",
            {"hf": "mistralai/Mixtral-8x22B"},  # where the publisher states the number
            {"hf": "mistralai/Mixtral-8x22B", "published_parameters": None},
            "config: given 46,702,792,704 parameters, allowed: 114,400,000,000 to 299,200,000,000, as hf says 8x22B",
        ),
        (
            models.size_in_name,
            "llama-3-8b",
            {"name": "Llama 3"},
            {"name": "Llama 3 70B"},
            "config: given 8,030,261,248 parameters, allowed: 45,500,000,000 to 119,000,000,000, as name says 70B",
        ),
        (
            models.size_in_name,
            "qwen3-30b-a3b",
            {"hf": "Qwen/Qwen3-A3B", "published_parameters": None},  # the experts that are active
            {"hf": "Qwen/Qwen3-3B", "published_parameters": None},
            "config: given 30,532,122,624 parameters, allowed: 1,950,000,000 to 5,100,000,000, as hf says 3B",
        ),
        (
            models.size_in_name,
            "llama-3-8b",
            {"aliases": ("meta-llama/Meta-Llama-3-8B-Instruct", "gradientai/Llama-3-8B-Instruct-262k")},
            {"aliases": ("meta-llama/Meta-Llama-3-70B-Instruct",)},  # which would be answered as an 8B
            "config: given 8,030,261,248 parameters, allowed: 45,500,000,000 to 119,000,000,000, "
            "as aliases[0] says 70B",
        ),
        (
            models.active_in_name,
            "qwen3-30b-a3b",
            {"name": "Qwen3 30B"},
            {"name": "Qwen3 30B-A22B"},
            "config: given 3,353,032,704 active parameters, allowed: 16,500,000,000 to 29,700,000,000, "
            "as name says A22B",
        ),
        (
            models.names,
            "llama-3-8b",
            {"aliases": ("a/b", "a/c")},
            {"aliases": ("a/b", "A/B")},
            "aliases[1]: given 'A/B', allowed: a name that the model does not have yet",
        ),
        (
            models.names,
            "llama-3-8b",
            {"unlike": {"somebody/Llama-3-8B-Vision": "it reads images"}},
            {"unlike": {"qwen/Qwen3-8B": "it reads images"}},
            "unlike: given 'qwen/Qwen3-8B', which models/qwen3-8b.yaml lists, allowed: names that no model has",
        ),
        (
            models.names,
            "llama-3-8b",
            {},
            {"name": "meta-llama/Meta-Llama-3-8B"},
            "name: given 'meta-llama/Meta-Llama-3-8B', allowed: the name that readers write, such as Llama 3 8B",
        ),
        (
            models.names,
            "llama-3-8b",
            {"source": "https://github.com/a/b/blob/main/config.json"},
            {"source": "https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json"},
            "source: given 'https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json', allowed: a file of "
            "meta-llama/Meta-Llama-3-8B or of one of aliases",
        ),
    ],
)
def test_a_rule_refuses_what_it_is_for(
    rule: Rule[Any], name: str, within: dict[str, Any], beyond: dict[str, Any], line: str
) -> None:
    assert said(rule, name, **within) == []
    assert said(rule, name, **beyond) == [line]


def test_a_field_is_of_the_kind_that_it_is_of_in_other_models() -> None:
    """Though nothing reads it. A model may have no value, and a whole number stands for a fraction."""
    catalog, line = load(), "models/qwen3-30b-a3b.yaml: config.router_aux_loss_coef: given {}, allowed: a number"
    for value, given in (("small", "'small'"), (True, "true"), (None, ""), (1, "")):
        model = catalog.models["qwen3-30b-a3b"]
        odd = replace(model, config={**model.config, "router_aux_loss_coef": value})
        found = list(models.kinds(replace(catalog, models={**catalog.models, model.id: odd}), ROOT))
        assert found == ([f"{line.format(given)}, as in the other models"] if given else [])
