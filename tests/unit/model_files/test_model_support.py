"""Models that cannot be used are refused by their config.json, before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quartet.contract.status import Role
from quartet.errors import ModelError
from quartet.model_files.model_support import not_causal_reason, unreadable_reason
from quartet.preflight.models import check_model
from tests.every_case import every_case

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def saved(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"\x02" + 7 * b"\0" + b"{}")
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


@every_case(
    ("config", "why", "remedy"),
    [
        ({"model_type": "xlnet"}, "an encoder (xlnet), whose tokens attend to later tokens", "Qwen3"),
        ({"model_type": "xlm"}, "an encoder (xlm), whose tokens attend to later tokens", "Qwen3"),
        ({"model_type": "cpmant"}, "an encoder (cpmant), whose tokens attend to later tokens", "Qwen3"),
        ({"model_type": "gemma4_assistant"}, "a drafter, which reads the hidden states", "give that model"),
        ({"model_type": "blt"}, "transformers cannot generate with it: DynamicCache reads", "Qwen3"),
        ({"model_type": "reformer"}, "transformers computes its gradients only in training mode", "Qwen3"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder-decoder model", "give a causal language model"),
        ({"model_type": "bart", "architectures": ["BartForCausalLM"]}, "an encoder-decoder model", "Qwen3"),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"]}, "an encoder (bert without is_decoder", "Qwen3"),
        (
            {
                "model_type": "clip",
                "architectures": ["CLIPModel"],
                "vision_config": {"hidden_size": 4},
                "text_config": {"model_type": "clip_text_model"},
            },
            "CLIPModel reads images, too",
            "give a causal language model",
        ),
        (
            {**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4}},
            "quantised weights (quantization_config: gptq)",
            "give the checkpoint in bfloat16 or float32",
        ),
        (
            {"model_type": "qwen", "auto_map": {"AutoConfig": "configuration_qwen.QWenConfig"}},
            "model type qwen needs Python code from its repository",
            "give a model of a type that transformers has",
        ),
        ({"model_type": "lama"}, "model type lama is unknown", "correct model_type in config.json"),
    ],
)
def test_a_policy_that_cannot_be_used_is_refused_with_reason_and_remedy(
    config: dict[str, Any], why: str, remedy: str, tmp_path: Path
) -> None:
    model = saved(tmp_path / "m", {"model_type": "llama", **config})
    with pytest.raises(ModelError) as caught:
        list(check_model("actor.model", Role.ACTOR, model, 8))
    assert str(caught.value).startswith(f"actor.model {model}: {why}")
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


@every_case(
    "config",
    [
        LLAMA,
        {**LLAMA, "auto_map": {"AutoModel": "modeling.Model"}},
        {"model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"]},
        {"model_type": "mamba", "architectures": ["MambaForCausalLM"]},
        {"model_type": "gemma3n_text", "num_kv_shared_layers": 15},
        {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "layer_types": ["sliding_attention"]},
        {"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": True},
        {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "vision_config": {},
            "text_config": {"model_type": "gemma3_text"},
        },
        {
            "model_type": "llava",
            "architectures": ["LlavaForConditionalGeneration"],
            "vision_config": {},
            "text_config": {"model_type": "llama"},
        },
        {"model_type": "voxtral", "architectures": ["VoxtralForConditionalGeneration"], "audio_config": {}},
        {"model_type": "gpt-sw3", "architectures": ["GPT2LMHeadModel"]},
    ],
)
def test_usable_models_are_accepted(config: dict[str, Any]) -> None:
    assert unreadable_reason(config) is None
    assert not_causal_reason(config) is None


def test_positions_under_the_name_of_older_models_are_checked(tmp_path: Path) -> None:
    model = saved(tmp_path / "m", {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_positions": 8})
    with pytest.raises(ModelError, match=r"supports 8 positions, and rollout\.max_response_tokens 8 leaves none"):
        list(check_model("actor.model", Role.ACTOR, model, 8))


def test_the_rule_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from quartet.model_files.model_support import unreadable_reason, not_causal_reason\n"
        "unreadable_reason({'model_type': 'x'}); not_causal_reason({'architectures': ['X']})\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": ""}, "config.json has model_type ''; expected the name of a type"),
        ({"model_type": 5}, "config.json has model_type 5; expected the name of a type"),
        ({"model_type": "lfm2", "num_hidden_layers": 10**9}, "num_hidden_layers 1000000000; expected 1 to 1,000"),
        ({"model_type": "lfm2", "num_hidden_layers": -3}, "num_hidden_layers -3; expected 1 to 1,000"),
        ({"model_type": "qwen3_5", "text_config": {"num_experts": 10**8}}, "num_experts 100000000; expected 1 to"),
        ({"model_type": "mamba2", "chunk_size": 0}, "chunk_size 0; expected 1 to"),
        ({"model_type": "deepseek_v32", "index_topk": -4}, "index_topk -4; expected 1 to"),
    ],
)
def test_sizes_that_no_model_has_are_named(config: dict[str, object], expected: str) -> None:
    reason = unreadable_reason(config)
    assert reason is not None
    assert expected in reason
    assert "correct config.json" in reason
