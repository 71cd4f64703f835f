"""Snapshots: they keep the weights at their time, write the files of a plain save, and leave no files after a failure."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers

from quartet.config.models import LoraConfig
from quartet.errors import StorageFailed
from quartet.models.hf_logging import suppress_hf_logging
from quartet.models.training.optimizer import create_optimizer, snapshot_optimizer
from quartet.models.value_head import HEAD_FILE
from quartet.models.weights.loading import load_causal_lm, load_critic, snapshot_model
from quartet.models.weights.lora import add_adapter
from quartet.models.weights.snapshot import Writer, host_state, write_model
from tests.unit.models import tiny
from tests.waiting import LIMIT


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def written(writer: Writer, directory: Path) -> dict[str, bytes]:
    write_model(directory, writer)
    return contents(directory)


def disturb(model: Any) -> None:
    """Change every trainable weight in place, as an update does."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(1.0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_a_snapshot_writes_the_same_files_as_a_plain_save(kind: str, dtype: str, tmp_path: Path) -> None:
    model = load_causal_lm(tiny.saved(tiny.causal(kind), tmp_path / "m"), dtype)
    model.save_pretrained(tmp_path / "plain")
    snapshot = snapshot_model(model)
    disturb(model)
    assert written(snapshot, tmp_path / "snapshot") == contents(tmp_path / "plain")
    assert written(snapshot_model(model), tmp_path / "later") != contents(tmp_path / "plain")


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_copied_and_written_once(tied: bool, tmp_path: Path) -> None:
    model = tiny.causal("llama", tie_word_embeddings=tied)
    state = host_state(model)
    assert (state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()) == tied
    names = safetensors.torch.load(written(snapshot_model(model), tmp_path / "s")["model.safetensors"]).keys()
    assert ("lm_head.weight" in names) != tied


def test_all_weights_except_frozen_ones_are_copied() -> None:
    model = tiny.causal("llama")
    model.model.layers[0].requires_grad_(False)
    state = model.state_dict()
    shared = {name for name, value in host_state(model).items() if value.data_ptr() == state[name].data_ptr()}
    assert shared == {name for name in state if name.startswith("model.layers.0.")}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2"])
def test_an_adapter_and_its_merged_model_are_written_as_of_the_snapshot(kind: str, tmp_path: Path) -> None:
    model = load_causal_lm(tiny.saved(tiny.causal(kind), tmp_path / "m"))
    base = {name: value.clone() for name, value in model.state_dict().items()}
    adapter = add_adapter(model, "base", LoraConfig(rank=2, alpha=8.0))
    disturb(model)
    factors = {name: value.clone() for name, value in model.state_dict().items() if ".lora_" in name}
    snapshots = adapter.snapshot_merged(), adapter.snapshot()
    disturb(model)
    merged = safetensors.torch.load(written(snapshots[0], tmp_path / "merged")["model.safetensors"])
    for name, value in merged.items():
        layer, _, leaf = name.rpartition(".")
        a, b = (factors.get(f"{layer}.lora_{half}.default.weight") for half in "AB")
        expected = base[name].double()
        if a is not None and b is not None and leaf == "weight":
            delta = 8.0 / 2 * (b.double() @ a.double())
            # GPT-2 stores its matrices transposed.
            expected = expected + (delta.T if kind == "gpt2" else delta)
        torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-5)
    saved = safetensors.torch.load(written(snapshots[1], tmp_path / "adapter")["adapter_model.safetensors"])
    assert len(saved) == len(factors) > 0
    for name, value in saved.items():
        layer_name = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
        assert torch.equal(value, factors[layer_name])


@pytest.mark.parametrize("adapted", [False, True])
def test_a_critic_and_its_head_are_written_as_of_the_snapshot(adapted: bool, tmp_path: Path) -> None:
    critic = load_critic(tiny.saved(tiny.classifier("llama"), tmp_path / "m"))
    adapter = add_adapter(critic.backbone, "base", LoraConfig(rank=2, alpha=4.0)) if adapted else None
    state = {name: value.clone() for name, value in critic.head.state_dict().items()}
    before = written(critic.snapshot(adapter), tmp_path / "before")
    late = critic.snapshot(adapter), *([critic.snapshot_adapter(adapter)] if adapter else [])
    disturb(critic)
    assert written(late[0], tmp_path / "late") == before
    for number, snapshot in enumerate(late):
        files = written(snapshot, tmp_path / str(number)) if number else before
        head = safetensors.torch.load(files[HEAD_FILE])
        assert head.keys() == state.keys()
        assert all(torch.equal(head[name], value) for name, value in state.items())


def test_an_optimizer_is_written_as_of_the_snapshot(tmp_path: Path) -> None:
    model = tiny.causal("llama")
    optimizer = create_optimizer(model, 0.1)

    def step() -> None:
        model(input_ids=torch.tensor([[3, 4, 5]])).logits.square().mean().backward()
        optimizer.step()

    step()
    before = written(snapshot_optimizer(optimizer), tmp_path / "before")
    snapshot = snapshot_optimizer(optimizer)
    step()
    assert written(snapshot, tmp_path / "late") == before
    assert written(snapshot_optimizer(optimizer), tmp_path / "after") != before


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """Let the kernel limit the size of files that this process writes. Keep the context short: pytest writes files, too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("part", ["weights", "optimizer", "head", "adapter"])
def test_a_save_that_exceeds_the_file_size_limit_keeps_the_old_directory(part: str, tmp_path: Path) -> None:
    critic = load_critic(tiny.saved(tiny.causal("llama"), tmp_path / "m"))
    adapter = add_adapter(critic.backbone, "base", LoraConfig(rank=2, alpha=4.0)) if part == "adapter" else None
    writers: dict[str, Callable[[], Writer]] = {
        "weights": lambda: snapshot_model(critic.backbone),
        "optimizer": lambda: snapshot_optimizer(create_optimizer(critic, 0.1)),
        "head": critic._snapshot_head,
        "adapter": lambda: adapter.snapshot() if adapter else critic.snapshot(),
    }
    old = written(lambda target: (target / "old").write_text("x") and None, tmp_path / "saved" / "p")
    refused = pytest.raises(StorageFailed, match=r"saved/p: cannot be written: .*(F|f)ile too large.*Free space")
    with refused, small_files(64):
        write_model(tmp_path / "saved" / "p", writers[part]())
    assert contents(tmp_path / "saved" / "p") == old
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["p"]


@pytest.mark.parametrize("stage", ["write", "flush", "rename"])
def test_a_full_disk_raises_storage_failed_at_every_stage_of_a_save(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    written(lambda target: (target / "old").write_text("x") and None, tmp_path / "p")
    writers: list[Writer] = [lambda target: (target / "half").touch()]
    with monkeypatch.context() as patch:
        if stage == "write":
            writers.append(full)
        else:
            patch.setattr(*((os, "fsync") if stage == "flush" else (Path, "rename")), full)
        with pytest.raises(StorageFailed, match="cannot be written: No space left on device; the previous content"):
            write_model(tmp_path / "p", *writers)
    assert contents(tmp_path / "p") == {"old": b"x"}
    assert [path.name for path in tmp_path.iterdir()] == ["p"]


@pytest.mark.parametrize("bug", [TypeError("a bug"), torch.OutOfMemoryError("CUDA out of memory")])
def test_an_unforeseen_exception_in_a_writer_is_not_reported_as_a_full_disk(bug: Exception, tmp_path: Path) -> None:
    def fail(_: Path) -> None:
        raise bug

    with pytest.raises(type(bug)):
        write_model(tmp_path / "p", fail)
    assert list(tmp_path.iterdir()) == []


def test_two_threads_that_suppress_logging_restore_the_settings() -> None:
    logging: Any = transformers.utils.logging
    logging.enable_progress_bar()
    before = logging.get_verbosity(), True
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with suppress_hf_logging():
            inside.set()
            assert leave.wait(LIMIT)

    thread = threading.Thread(target=other)
    with suppress_hf_logging():
        thread.start()
        assert inside.wait(LIMIT)
    # The other thread is still inside its context.
    assert not logging.is_progress_bar_enabled()
    leave.set()
    thread.join()
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


@pytest.mark.parametrize(
    ("error", "is_storage"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (PermissionError(errno.EACCES, "Permission denied"), True),
        (Exception("I/O error: File too large (os error 27)"), True),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), False),
        (Exception("invalid tensor"), False),
        (KeyError("weight"), False),
    ],
)
def test_only_errors_of_the_disk_count_as_storage_errors(error: Exception, is_storage: bool, tmp_path: Path) -> None:
    def fail(_: Path) -> None:
        raise error

    with pytest.raises(StorageFailed if is_storage else type(error)):
        write_model(tmp_path / "m", fail)
