"""Loading and saving of checkpoints, and the errors for unusable ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import structlog
import torch
import transformers

from quartet.errors import ModelError
from quartet.models.weights import loading
from quartet.models.weights.loading import (
    count_parameters,
    load_causal_lm,
    load_critic,
    load_reward_model,
    stop_token_ids,
)
from quartet.models.weights.tokenizer import load_tokenizer, tokenizer_fingerprint
from tests.unit.models import tiny
from tests.unit.models.saving import save_policy

IDS = torch.tensor([[3, 4, 5, 6]])


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def drop_weight(directory: Path, name: str) -> None:
    path = directory / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors[name]
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_saved_causal_lm_loads_unchanged(kind: str, tmp_path: Path) -> None:
    model = tiny.causal(kind)
    loaded = load_causal_lm(str(tiny.saved(model, tmp_path / "m")))
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_loads_in_the_requested_dtype(dtype: str, tmp_path: Path) -> None:
    loaded = load_reward_model(tiny.saved(tiny.classifier("llama"), tmp_path / "m"), dtype)
    assert {parameter.dtype for parameter in loaded.parameters()} == {getattr(torch, dtype)}


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_dropout_stays_off_even_in_training_mode(kind: str, tmp_path: Path) -> None:
    rates = {"gpt2": {"attn_pdrop": 0.5, "embd_pdrop": 0.5, "resid_pdrop": 0.5}, "gpt_neox": {"attention_dropout": 0.5}}
    changes = rates.get(kind, {"attention_dropout": 0.5})
    loaded = load_causal_lm(tiny.saved(tiny.causal(kind, **changes), tmp_path / "m"))
    expected = loaded(IDS).logits
    assert torch.equal(loaded.train()(IDS).logits, expected)


def missing(directory: Path) -> Path:
    return directory / "nowhere"


def empty(directory: Path) -> Path:
    (directory / "empty").mkdir()
    return directory / "empty"


def without_config(directory: Path) -> Path:
    (directory / "config.json").unlink()
    return directory


def broken_config(directory: Path) -> Path:
    (directory / "config.json").write_text('{"model_type": "llama",')
    return directory


def unknown_kind(directory: Path) -> Path:
    edit_config(directory, model_type="no-such-model")
    return directory


def own_code(directory: Path) -> Path:
    edit_config(
        directory, model_type="mine", auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    )
    (directory / "code.py").write_text("raise SystemExit('code from a checkpoint ran')\n")
    return directory


def without_weights(directory: Path) -> Path:
    (directory / "model.safetensors").unlink()
    return directory


def truncated(directory: Path) -> Path:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-500])
    return directory


def pickled(directory: Path) -> Path:
    (directory / "model.safetensors").unlink()
    # The pickle is complete and harmless, so only the ban on pickles can refuse it.
    torch.save(tiny.causal("llama").state_dict(), directory / "pytorch_model.bin")  # noqa: TID251 - a file that is to be refused
    return directory


def weight_missing(directory: Path) -> Path:
    drop_weight(directory, "model.layers.1.mlp.up_proj.weight")
    return directory


def head_missing(directory: Path) -> Path:
    drop_weight(directory, "lm_head.weight")
    return directory


def other_shape(directory: Path) -> Path:
    edit_config(directory, intermediate_size=40)
    return directory


def no_architecture(directory: Path) -> Path:
    edit_config(directory, architectures=["LlamaModel"])
    return directory


@pytest.mark.parametrize(
    ("breaking", "words"),
    [
        (missing, "no such directory"),
        (empty, "empty"),
        (without_config, "config.json"),
        (broken_config, "config.json"),
        (unknown_kind, "no-such-model"),
        (own_code, "model type mine needs Python code from its repository"),
        (without_weights, "contains no safetensors files"),
        (truncated, "its header says"),
        (pickled, "contains no safetensors files"),
        (weight_missing, "layers.1.mlp.up_proj.weight"),
        (head_missing, "lm_head.weight"),
        (other_shape, "weights have another shape"),
        (no_architecture, r"architectures \['LlamaModel'\]"),
    ],
)
def test_an_unusable_checkpoint_is_refused_in_one_line_with_its_path(
    breaking: Callable[[Path], Path], words: str, tmp_path: Path
) -> None:
    path = breaking(tiny.saved(tiny.causal("llama"), tmp_path / "m"))
    with pytest.raises(ModelError, match=words) as caught:
        load_causal_lm(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tied", [True, False])
def test_a_classifier_is_refused_as_a_causal_lm_and_vice_versa(tied: bool, tmp_path: Path) -> None:
    tiny.saved(tiny.classifier("llama", tie_word_embeddings=tied), tmp_path / "classifier")
    tiny.saved(tiny.causal("llama", tie_word_embeddings=tied), tmp_path / "causal")
    with pytest.raises(ModelError, match="expected a causal language model"):
        load_causal_lm(tmp_path / "classifier")
    with pytest.raises(ModelError, match="expected a sequence classifier"):
        load_reward_model(tmp_path / "causal")


def test_a_reward_model_and_a_critic_need_exactly_one_output(tmp_path: Path) -> None:
    tiny.saved(tiny.classifier("llama", num_labels=3), tmp_path / "m")
    for load in (load_reward_model, load_critic):
        with pytest.raises(ModelError, match="3 outputs"):
            load(tmp_path / "m")


def test_a_reward_model_without_its_head_is_refused(tmp_path: Path) -> None:
    tiny.saved(tiny.classifier("llama"), tmp_path / "m")
    drop_weight(tmp_path / "m", "score.weight")
    with pytest.raises(ModelError, match=r"score\.weight"):
        load_reward_model(tmp_path / "m")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("float8", "cpu"), "float8"), (("float32", "cuda:99"), "cuda:99"), (("float32", "toaster"), "toaster")],
)
def test_an_unknown_dtype_or_device_is_refused(arguments: tuple[str, str], words: str, tmp_path: Path) -> None:
    tiny.saved(tiny.causal("llama"), tmp_path / "m")
    with pytest.raises(ModelError, match=words):
        load_causal_lm(tmp_path / "m", *arguments)


def test_a_saved_tokenizer_keeps_its_fingerprint(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.save_pretrained(tmp_path / "t")
    fingerprint = tokenizer_fingerprint(load_tokenizer(tmp_path / "t"))
    assert fingerprint == tokenizer_fingerprint(tokenizer)
    assert len(fingerprint) == 64
    assert fingerprint == tokenizer_fingerprint(tiny.tokenizer(eos="w3")), "equal ids must give equal fingerprints"
    tokenizer.add_tokens(["new"])
    assert fingerprint != tokenizer_fingerprint(tokenizer)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_a_checkpoint_without_a_tokenizer_is_refused_with_the_expected_files(kind: str, tmp_path: Path) -> None:
    tiny.saved(tiny.causal(kind), tmp_path / "m")
    missing = f"model {tmp_path / 'm'}: its tokenizer files are missing; expected tokenizer.json, or another vocabulary"
    with pytest.raises(ModelError, match=re.escape(missing)):
        load_tokenizer(tmp_path / "m")
    (tmp_path / "m" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ModelError, match=re.escape(missing)):
        load_tokenizer(tmp_path / "m")


def test_a_tokenizer_loads_from_other_formats_than_one_file(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    assert load_tokenizer(tmp_path)("ab").input_ids == [2]
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    (tmp_path / "bytes" / "config.json").write_text('{"model_type": "llama"}')
    assert load_tokenizer(tmp_path / "bytes")("a").input_ids[0] == ord("a") + 3


def test_the_tokenizer_of_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        load_tokenizer(tmp_path / "nowhere")


def test_stop_ids_come_from_every_source() -> None:
    model = tiny.causal("llama", eos_token_id=[4, 5])
    model.generation_config.eos_token_id = 6
    assert stop_token_ids(model, tiny.tokenizer()) == {1, 4, 5, 6}
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    assert stop_token_ids(model, None) == frozenset()


def test_stop_ids_outside_the_vocabulary_are_ignored_with_a_warning() -> None:
    model, tokenizer = tiny.causal("llama", eos_token_id=[4, tiny.VOCABULARY]), tiny.tokenizer()
    model.generation_config.eos_token_id = -1
    with structlog.testing.capture_logs() as logs:
        assert stop_token_ids(model, tokenizer) == {1, 4}
    allowed = f"ignored, because the token ids of the model are 0..{tiny.VOCABULARY - 1}"
    assert [each["event"].partition("eos_token_id ")[2] for each in logs][:2] == [
        f"-1: {allowed}",
        f"{tiny.VOCABULARY}: {allowed}",
    ]


def test_shared_parameters_are_counted_once() -> None:
    tied, untied = tiny.causal("llama", tie_word_embeddings=True), tiny.causal("llama", tie_word_embeddings=False)
    assert count_parameters(untied) - count_parameters(tied) == tiny.VOCABULARY * 32


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_saved_policy_loads_again_and_has_the_same_bytes_every_time(kind: str, tmp_path: Path) -> None:
    model, tokenizer = tiny.causal(kind), tiny.tokenizer()
    for name in ("a", "b"):
        save_policy(model, tokenizer, tmp_path / "deep" / name)
    a, b = tmp_path / "deep" / "a", tmp_path / "deep" / "b"
    assert sorted(path.name for path in a.iterdir()) == sorted(path.name for path in b.iterdir())
    assert all(path.read_bytes() == (b / path.name).read_bytes() for path in a.iterdir())
    assert torch.equal(load_causal_lm(a)(IDS).logits, model(IDS).logits)
    assert tokenizer_fingerprint(load_tokenizer(a)) == tokenizer_fingerprint(tokenizer)
    assert load_tokenizer(a)("w3 w4 w60").input_ids == [3, 4, 60]
    assert not list(a.glob("*.bin"))


def test_a_second_save_replaces_the_whole_directory(tmp_path: Path) -> None:
    save_policy(tiny.causal("llama"), None, tmp_path / "p")
    (tmp_path / "p" / "leftover").touch()
    save_policy(tiny.causal("llama", seed=1), None, tmp_path / "p")
    assert not (tmp_path / "p" / "leftover").exists()
    assert torch.equal(load_causal_lm(tmp_path / "p")(IDS).logits, tiny.causal("llama", seed=1)(IDS).logits)
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


def test_concurrent_loads_leave_transformers_unchanged(tmp_path: Path) -> None:
    saved = tiny.saved(tiny.causal("llama"), tmp_path / "model")
    before = transformers.PreTrainedModel.tie_weights
    with ThreadPoolExecutor(4) as pool:
        for loaded in [pool.submit(load_causal_lm, saved, "float32", "cpu") for _ in range(24)]:
            loaded.result()
    assert transformers.PreTrainedModel.tie_weights is before


def test_a_model_whose_tokens_attend_to_later_tokens_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelError, match=r"an encoder \(bert without is_decoder: true\), whose tokens attend to later"):
        load_causal_lm(tiny.saved(tiny.causal("bert"), tmp_path / "m"))
    load_causal_lm(tiny.saved(tiny.causal("bert", is_decoder=True), tmp_path / "d"))
    # An encoder that the rule does not know.
    monkeypatch.setattr(loading, "not_causal_reason", lambda config: None)
    with pytest.raises(ModelError, match="BertLMHeadModel predicts a token from later tokens, too"):
        load_causal_lm(tmp_path / "m")


def test_weights_stay_those_of_the_checkpoint_after_a_forward_pass(tmp_path: Path) -> None:
    model = tiny.causal("rwkv")
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    loaded = load_causal_lm(tiny.saved(model, tmp_path))
    ids = torch.arange(5)[None]
    with torch.no_grad():
        outputs = loaded(input_ids=ids, use_cache=False).logits
        # In evaluation mode transformers scales the weights.
        assert torch.allclose(outputs, model.train()(input_ids=ids, use_cache=False).logits, atol=1e-6)
    assert all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items())
