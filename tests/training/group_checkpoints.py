"""Groups of processes that train, save and restore tiny models, and helpers for the test that starts them.

``python -m tests.training.group_checkpoints FOLDER GROUPS``.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import safetensors.torch
import torch
import torch.distributed as dist

from quartet.config.models import ActorConfig, CriticConfig, LoraConfig
from quartet.contract.weights import SavedFile, SaveKind
from quartet.models.training.optimizer import optimizer_parts
from quartet.models.weights.safetensors_file import SafetensorsFile
from quartet.models.workers import sharded_checkpoint
from quartet.models.workers.workers import SINGLE, Workers
from quartet.services.actor.actor import Actor
from quartet.services.critic.critic import Critic
from quartet.services.trainable_model import TrainableModel
from tests.e2e.commands import Command
from tests.unit.models import multimodal, tiny

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
    "multimodal": {"kind": "qwen2_5_vl"},
    "frozen": {"freeze": ["model.layers.0.*"]},
}


def save_base(folder: Path, case: str) -> None:
    """Save the initial model of a case."""
    large = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 2048, "vocab_size": 8192}
    kind, changes = CASES[case].get("kind", "llama"), large if case == "large" else {}
    model = multimodal.model(kind) if kind in multimodal.KINDS else tiny.causal(kind, **changes)
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
    return Actor(config, "cpu", folder, no_buffer, workers=workers)


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


@dataclass(frozen=True)
class Group:
    """A group of ``size`` processes, of which ``tensor`` compute slices of the same layers. ``action`` is done for all cases."""

    size: int
    action: str
    cases: list[str]
    tensor: int = 1


def run_groups(folder: Path, *groups: Group, fresh: bool = False) -> None:
    """Run the groups, one after the other. Their processes are forks of one, which has imported torch unless it is ``fresh``."""
    # Freed tensors go back to the system at once, so that resident memory shows what is held.
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MALLOC_MMAP_THRESHOLD_": "65536"}
    listed = json.dumps([asdict(group) for group in groups])
    command = Command(
        sys.executable, "-m", __name__, folder, listed, cwd=Path.cwd(), environment=environment, fresh=fresh
    )
    try:
        result = command.wait(500)
    finally:
        command.clean_up()
    assert result.code == 0, result.out + result.err


def saved_state(folder: Path, case: str, action: str, size: int) -> dict[str, torch.Tensor]:
    """Return the state of a case in an action of a ``Group``."""
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
    """Fail on one rank, and record the error of every rank by the name of the fault.

    A rank writes its part of a checkpoint on a full disk, with another error, or it ends. A model is written on a full disk, with
    another error, or on a disk that is full when the files are closed. A rank cannot read its parts.
    """
    model = build(folder, case, workers)
    train(model, 1)
    errors: dict[str, list[str]] = {}

    def attempt(fault: str, work: Callable[[], object]) -> None:
        try:
            work()
            errors[fault] = []
        except BaseException as error:
            errors[fault] = [type(error).__name__, str(error)]
        (folder / f"errors-{workers.rank}.json").write_text(json.dumps(errors))

    def fault_of(fault: str) -> Callable[..., Any]:
        def fail(file: Any, *arguments: Any) -> None:
            if fault.endswith("ended"):
                os._exit(0)
            if fault.endswith("unforeseen"):
                raise ValueError("unforeseen")
            if fault == "model-full-when-closed":
                file._file.close()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        return fail

    def save_with_fault(fault: str) -> None:
        model_is_saved = fault.startswith("model")
        method = "__exit__" if fault.endswith("closed") else "write"
        with ExitStack() as stack:
            if workers.rank == (0 if model_is_saved else 1):
                stack.enter_context(mock.patch.object(SafetensorsFile, method, fault_of(fault)))
            kind = SaveKind.MODEL if model_is_saved else SaveKind.CHECKPOINT
            attempt(fault, lambda: save(model, f"bad/{fault}", kind, workers.rank))

    def read_with_fault() -> None:
        with ExitStack() as stack:
            if workers.rank == 1:
                stack.enter_context(mock.patch.object(sharded_checkpoint, "read_block", fault_of("")))
            model.restore(RUN, 3, 1, f"{case}-two")

    for fault in ("model-full", "model-unforeseen", "model-full-when-closed", "full", "unforeseen"):
        save_with_fault(fault)
        if workers.rank == 0:
            assert not any((folder / "bad").iterdir())
    attempt("read", read_with_fault)
    # The group continues.
    attempt("read again", lambda: model.restore(RUN, 3, 1, f"{case}-two"))
    save_with_fault("ended")
    assert not (folder / "bad/ended").exists()


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


def work(folder: Path, group: Group, rank: int, listener: socket.socket) -> None:
    """Do the work of one rank, and end its process."""
    status = 1
    try:
        torch.set_num_threads(1)
        port, descriptor = listener.getsockname()[1], listener.detach()
        if rank:
            os.close(descriptor)
        address = ("127.0.0.1", port)
        workers = join_group(rank, group.size, address, None if rank else descriptor, tensor=group.tensor)
        for case in group.cases:
            if group.action == "memory":
                measure_memory(folder, case, workers)
            else:
                continue_checkpoint(folder, case, group.action, workers)
        if group.action == "train-two":
            fail_saves(folder, group.cases[0], workers)
        status = 0
    finally:
        if status:
            traceback.print_exc()
        # Without the teardown of the process group, which waits for ended ranks.
        os._exit(status)


def main(folder: Path, groups: list[Group]) -> None:
    for group in groups:
        listener = socket.create_server(("127.0.0.1", 0), backlog=group.size)
        ranks = list[int]()
        for rank in range(group.size):
            ranks.append(os.fork())
            if not ranks[-1]:
                work(folder, group, rank, listener)
        listener.close()
        if statuses := [status for rank in ranks if (status := os.waitpid(rank, 0)[1])]:
            sys.exit(f"a rank of {group} ended with {statuses}")


if __name__ == "__main__":
    from quartet.models.workers.group import join_group

    main(Path(sys.argv[1]), [Group(**group) for group in json.loads(sys.argv[2])])
