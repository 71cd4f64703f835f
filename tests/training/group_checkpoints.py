"""One rank of a group that trains, saves and restores tiny models, and helpers for the test that starts it.

``python -m tests.training.group_checkpoints FOLDER RANK SIZE PORT SOCKET TENSOR ACTION CASE...``.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist

from quartet.config import ActorConfig, CriticConfig, LoraConfig
from quartet.models.training.optimizer import optimizer_parts
from quartet.models.workers.workers import SINGLE, Workers
from quartet.services.actor.actor import Actor
from quartet.services.critic.critic import Critic
from quartet.services.trainable_model import TrainableModel
from quartet.types import SavedFile, SaveKind
from tests.unit.models import tiny

RUN = "run"
CASES: dict[str, dict[str, Any]] = {
    "actor": {},
    "critic": {},
    "tied": {"kind": "qwen2"},
    "mixture": {"kind": "mixtral"},
    "bfloat16": {"dtype": "bfloat16"},
    "critic-bfloat16-lora": {"dtype": "bfloat16", "lora": {"rank": 2}},
    "actor-lora": {"lora": {"rank": 2}},
    "large": {"kind": "llama"},
    "frozen": {"freeze": ["model.layers.0.*"]},
}


def save_base(folder: Path, case: str) -> None:
    """Save the initial model of a case."""
    large = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 2048, "vocab_size": 8192}
    model = tiny.causal(CASES[case].get("kind", "llama"), **(large if case == "large" else {}))
    directory = tiny.saved(model, folder / f"{case}-base")
    tiny.tokenizer().save_pretrained(directory)


def build(folder: Path, case: str, workers: Workers = SINGLE) -> TrainableModel:
    """Return the model of a case, with the run's directory ``folder``."""
    options = {name: value for name, value in CASES[case].items() if name != "kind"}
    lora = LoraConfig(**options.pop("lora")) if "lora" in options else None
    base = str(folder / f"{case}-base")
    if case.startswith("critic"):
        return Critic(CriticConfig(lora=lora, **options), base, "cpu", folder, no_buffer, workers=workers)
    config = ActorConfig(model=base, lora=lora, **options)
    return Actor(config, "cpu", 4, folder, no_buffer, create_engine=no_engine, workers=workers)


def no_engine(policy: Any) -> Any:
    return SimpleNamespace(close=lambda: None)


def no_buffer(run: str) -> Any:
    raise AssertionError(run)


def train(model: TrainableModel, steps: int) -> None:
    """Step the optimizer with gradients that depend on the parameter and the step only."""
    optimizer = model._optimizer
    for step in range(steps):
        for index, weight in enumerate(optimizer.stepped_parameters()):
            generator = torch.Generator().manual_seed(1000 * step + index)
            gradient = torch.randn(optimizer.complete_shape(weight), generator=generator)
            weight.grad = gradient[optimizer.part(weight, weight).region].clone()
        optimizer.step()
        optimizer.zero_grad()


def state(model: TrainableModel, workers: Workers = SINGLE) -> dict[str, torch.Tensor]:
    """Return all weights and the optimizer's state, gathered from all ranks."""
    weights = {
        name: workers.complete(value).detach().clone()
        for name, value in model._model.state_dict(keep_vars=True).items()
    }
    for name, part in optimizer_parts(model._optimizer).items():
        total = torch.zeros(part.shape, dtype=part.tensor.dtype)
        if part.saved_here or workers.size == 1:
            total[part.region] = part.tensor.detach()
        if workers.size > 1:
            # Ranks of a tensor parallel group, too, have different parts.
            dist.all_reduce(total)
        weights[f"optimizer.{name}"] = total
    return weights


def save(model: TrainableModel, directory: str, kind: SaveKind = SaveKind.CHECKPOINT, rank: int = 0) -> list[SavedFile]:
    """Save the model and return the files on rank 0."""
    write = model.snapshot(RUN, 1, directory, kind)
    return write() if rank == 0 or kind is SaveKind.CHECKPOINT else []


def run_group(folder: Path, size: int, action: str, cases: list[str], tensor: int = 1) -> None:
    """Run ``action`` for all cases with ``size`` processes, of which ``tensor`` compute slices of the same layers."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # Freed tensors go back to the system at once, so that resident memory shows what is held.
    environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    listener = socket.create_server(("127.0.0.1", 0), backlog=size)
    port, descriptor = listener.getsockname()[1], listener.fileno()
    arguments = [str(folder), "{}", str(size), str(port), str(descriptor), str(tensor), action, *cases]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, *(argument.format(rank) for argument in arguments)],
            env=environment,
            pass_fds=() if rank else (descriptor,),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    listener.close()
    try:
        outputs = [process.communicate(timeout=500)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * size, "\n".join(outputs)


def saved_state(folder: Path, case: str, action: str, size: int) -> dict[str, torch.Tensor]:
    """Return the state of a case in an action of ``run_group``."""
    return safetensors.torch.load_file(folder / f"{case}-{action}-{size}.safetensors")


def saved_files(folder: Path, case: str, action: str, size: int) -> list[SavedFile]:
    """Return the files that rank 0 has reported for the checkpoint of a case."""
    return [SavedFile(*entry) for entry in json.loads((folder / f"{case}-{action}-{size}.json").read_text())]


def continue_checkpoint(folder: Path, case: str, action: str, workers: Workers) -> None:
    """Train, or restore a checkpoint, then save it again and save the model. ``action`` is SOURCE-TARGET, or train-TARGET."""
    source, _, target = action.partition("-")
    model = build(folder, case, workers)
    if source == "train":
        train(model, 3)
    else:
        model.restore(RUN, 3, 1, f"{case}-{source}")
    complete = state(model, workers)
    files = save(model, f"{case}-{target}", rank=workers.rank)
    save(model, f"{case}-{target}-model", SaveKind.MODEL, workers.rank)
    if workers.rank == 0:
        name = folder / f"{case}-{action}-{workers.size}"
        tensors = {key: value.contiguous().clone() for key, value in complete.items()}
        safetensors.torch.save_file(tensors, name.with_suffix(".safetensors"))
        listed = [[file.path, file.bytes, file.sha256] for file in files]
        name.with_suffix(".json").write_text(json.dumps(listed))


def fail_saves(folder: Path, case: str, workers: Workers) -> None:
    """Save where rank 1 fails: by a full disk, by another error, and by its end. Rank 0 records the errors and the files."""
    model = build(folder, case, workers)
    train(model, 1)

    def fail(path: Path, parts: Any) -> None:
        if directory == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if directory == "killed":
            os._exit(0)
        raise ValueError("unforeseen")

    errors = {}
    if workers.rank:
        group_saves.write_parts = fail
    for directory in ("full", "failed", "killed"):
        try:
            save(model, f"bad/{directory}", rank=workers.rank)
        except Exception as error:
            errors[directory] = [type(error).__name__, str(error)]
        if workers.rank == 0 and directory != "killed":
            assert not any((folder / "bad").iterdir())
    assert not (folder / "bad/killed").exists()
    (folder / "errors.json").write_text(json.dumps(errors))


def measure_memory(folder: Path, case: str, workers: Workers) -> None:
    """Record by how many bytes each save raises the resident memory of rank 0."""
    model = build(folder, case, workers)
    train(model, 1)
    peaks = {}
    for kind in (SaveKind.CHECKPOINT, SaveKind.MODEL):
        # Connections and caches.
        save(model, f"{case}-warm-up", kind, workers.rank)
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        files = save(model, f"{case}-{kind.name.lower()}", kind, workers.rank)
        peaks[kind.name.lower()] = memory("VmHWM") - before
        peaks[f"{kind.name.lower()}_files"] = sum(file.bytes for file in files)
    if workers.rank == 0:
        (folder / "memory.json").write_text(json.dumps(peaks))


def memory(name: str) -> int:
    """Return an entry of the kernel's status of this process, in bytes."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def main(
    folder: Path, rank: int, size: int, port: int, descriptor: int | None, tensor: int, action: str, cases: list[str]
) -> None:
    torch.set_num_threads(1)
    workers = join_group(rank, size, ("127.0.0.1", port), descriptor, tensor=tensor)
    for case in cases:
        if action == "memory":
            measure_memory(folder, case, workers)
        else:
            continue_checkpoint(folder, case, action, workers)
    if action == "train-two":
        fail_saves(folder, cases[0], workers)
    # Without the teardown of the process group, which waits for ended ranks.
    os._exit(0)


if __name__ == "__main__":
    from quartet.models.workers import group_saves
    from quartet.models.workers.group import join_group

    number, count, address, listening, slices = map(int, sys.argv[2:7])
    main(Path(sys.argv[1]), number, count, address, None if number else listening, slices, sys.argv[7], sys.argv[8:])
