"""Description of a checkpoint for an engine, read without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quartet.engines.served_model import read_served_model
from quartet.errors import ModelError
from quartet.models.generation.torch_engine import served_model
from quartet.models.weights.loading import stop_token_ids
from tests.unit.models import tiny

CONFIG = {"vocab_size": 100, "max_position_embeddings": 64}


def write(folder: Path, **files: Any) -> str:
    """Write JSON files by their names without the suffix. Return the folder."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)


def test_a_checkpoint_is_described_as_its_loaded_model_is(tmp_path: Path) -> None:
    model, tokenizer = tiny.causal("llama"), tiny.tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    result = read_served_model(str(tmp_path), "float32")
    expected = served_model(model, stop_token_ids(model, tokenizer))
    assert result.vocabulary_size == expected.vocabulary_size
    assert result.max_sequence_tokens == expected.max_sequence_tokens
    assert (result.stop_ids, result.dtype) == (expected.stop_ids, expected.dtype)
    assert result.model == str(tmp_path)


@pytest.mark.parametrize(
    ("files", "stops"),
    [
        ({"config": CONFIG}, set()),
        ({"config": {**CONFIG, "eos_token_id": 0}}, {0}),
        ({"config": {**CONFIG, "eos_token_id": [1, 2]}, "generation_config": {"eos_token_id": 3}}, {1, 2, 3}),
        ({"config": {"text_config": {**CONFIG, "eos_token_id": 4}, "eos_token_id": 5}}, {4, 5}),
        (
            {
                "config": CONFIG,
                "tokenizer_config": {"eos_token": {"content": "<end>"}},
                "tokenizer": {"added_tokens": [{"content": "<end>", "id": 6}], "model": {"vocab": {"<end>": 7}}},
            },
            {6},
        ),
        (
            {
                "config": CONFIG,
                "tokenizer_config": {"eos_token": "</s>"},
                "tokenizer": {"model": {"vocab": [["a", 0.0], ["</s>", 0.0]]}},
            },
            {1},
        ),
        ({"config": CONFIG, "tokenizer_config": {"eos_token": "unknown"}, "tokenizer": {}}, set()),
        ({"config": {**CONFIG, "eos_token_id": 99}, "generation_config": {"eos_token_id": -1}}, {99}),
        ({"config": {**CONFIG, "eos_token_id": [100, -2, 3, 2**70]}}, {3}),
    ],
)
def test_every_stop_token_of_the_files_counts(files: dict[str, Any], stops: set[int], tmp_path: Path) -> None:
    result = read_served_model(write(tmp_path, **files), "bfloat16")
    assert result.stop_ids == stops
    assert (result.vocabulary_size, result.max_sequence_tokens) == (100, 64)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "config.json is missing; give a complete checkpoint"),
        ({"config": {}}, "config.json has no vocab_size; give the checkpoint of a language model"),
        ({"config": [1]}, "expected a JSON object"),
        ({"config": CONFIG, "generation_config": "no"}, "expected a JSON object"),
        *(
            ({"config": CONFIG, "generation_config": {"eos_token_id": value}}, "eos_token_id .*: expected a token id")
            for value in (2.0, "2", True, [[2]], [2, None], {"id": 2})
        ),
        ({"config": CONFIG, "tokenizer_config": {"eos_token": "a"}, "tokenizer": {"model": {"vocab": 5}}}, "damaged"),
    ],
)
def test_a_checkpoint_that_describes_no_language_model_is_refused(
    files: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=expected):
        read_served_model(write(tmp_path, **files), "float32")


def test_a_file_that_is_not_json_is_refused(tmp_path: Path) -> None:
    write(tmp_path, config=CONFIG)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: cannot be read"):
        read_served_model(str(tmp_path), "float32")
