"""Random models on this CPU, and measured memory and seconds of their work, to hold `quartet plan` to.

python -m benchmarks.plan_cases CASE prints the peak memory and the seconds of an update in a new process, as JSON. RANK, PORT and
SOCKET follow for a rank of a group: its number, the port of the rendezvous, and in rank 0 the listening socket.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from quartet.config.loading import config_of
from quartet.config.models import LoraConfig
from quartet.config.root import Config
from quartet.contract.status import Role
from quartet.model_files.shape import model_shape
from quartet.models.workers.workers import SINGLE, Workers
from quartet.planner.device_memory import trained_memory
from quartet.planner.gpus import CPU
from quartet.planner.roofline import Parallel
from quartet.planner.workload import Workload, role_work

STEP = 1
RANK_SECONDS = 600.0
# glibc returns every larger block to the kernel at once, so the peak is that of live tensors.
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144", "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True)
class Case:
    """A random model and an update or a step of it.

    ``role``: actor or critic. ``rank``: of an adapter, 0 for all weights. ``processes``: ranks that share the update.
    """

    kind: str
    hidden: int
    layers: int
    vocabulary: int
    role: str = "actor"
    dtype: str = "float32"
    tokens: int = 2048
    checkpointing: bool = False
    rank: int = 0
    responses: int = 32
    prompt: int = 64
    response: int = 192
    processes: int = 1

    @property
    def name(self) -> str:
        """Short description for a table."""
        parts = [f"{self.kind} {self.hidden}x{self.layers}, vocabulary {self.vocabulary}", self.dtype]
        parts += ["checkpointing"] * self.checkpointing + [f"LoRA rank {self.rank}"] * bool(self.rank)
        parts += [f"{self.processes} processes"] * (self.processes > 1)
        return ", ".join(parts)

    @property
    def parallel(self) -> Parallel:
        """Parallel sizes of the update."""
        return Parallel(shard=self.processes)

    def description(self) -> dict[str, Any]:
        """Return the model's config.json."""
        return {
            "model_type": self.kind,
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 64,
            "max_position_embeddings": 1024,
            "pad_token_id": 0,
            **({} if self.kind in ("gpt2", "gpt_neox") else {"num_key_value_heads": max(1, self.hidden // 128)}),
            **({} if self.kind == "gpt2" else {"intermediate_size": 3 * self.hidden}),
        }

    def config(self) -> Config:
        """Return the config of a run with this model."""
        trained = {
            "dtype": self.dtype,
            "micro_batch_tokens": self.tokens,
            "gradient_checkpointing": self.checkpointing,
            "lora": {"rank": self.rank} if self.rank else None,
        }
        return config_of(
            {
                "data": {"prompts": "none", "max_prompt_tokens": self.prompt},
                "rollout": {"prompts_per_step": self.responses, "max_response_tokens": self.response},
                "algorithm": {"num_epochs": 1, "num_mini_batches": 2},
                "actor": {"model": "none", **trained},
                "critic": {"model": "none", **trained},
                "reward": {"model": "none"},
            }
        )

    def load(self) -> Workload:
        """Return the work of a step with this model only."""
        config = self.config()
        shape = model_shape(self.description(), self.name)
        roles = tuple(role_work(config, f"{role}.model", role, shape) for role in (Role.ACTOR, Role.CRITIC))
        rollout, lengths = config.rollout, (self.prompt, self.response)
        return Workload(
            *(roles, rollout.prompts_per_step, 1, *lengths, *lengths, self.responses, 1, 2, 1.0, "torch", False)
        )

    def predicted_bytes(self) -> float:
        """Return the planned peak memory of an update, without the memory of the process itself."""
        return sum(self.predicted_parts().values())

    def predicted_parts(self) -> dict[str, float]:
        """Return the planned peak memory by part, without the memory of the process itself."""
        load = self.load()
        work = load.role(Role(self.role))
        assert work is not None
        parts = trained_memory(work, load, CPU, self.parallel, self.tokens, self.checkpointing, offload=False)
        return {name: size for name, size in parts.items() if name != "context"}

    def measured_bytes(self) -> tuple[float, float]:
        """Return the peak memory of an update in new processes, of the largest rank: of tensors, and resident memory."""
        results = self._run(RETURN_MEMORY)
        return max(result["bytes"] for result in results), max(result["resident"] for result in results)

    def measured_seconds(self, rounds: int) -> tuple[float, float]:
        """Return the seconds of an update of a group in new processes, and the bytes/s of its collectives."""
        results = self._run({"ROUNDS": str(rounds)})
        return max(result["seconds"] for result in results), min(result["link"] for result in results)

    def seconds_beside(self, copies: int, rounds: int) -> float:
        """Return the seconds of an update by one of ``copies`` processes that share the threads of this process, but no model."""
        return max(result["seconds"] for result in self._run({"ROUNDS": str(rounds)}, copies))

    def _run(self, variables: dict[str, str], copies: int = 1) -> list[dict[str, float]]:
        """Return the results of each rank, or of each of ``copies``."""
        count = max(self.processes, copies)
        threads = max(1, torch_threads() // count)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), **variables}
        command = [sys.executable, "-m", "benchmarks.plan_cases", json.dumps(asdict(self))]
        with socket.create_server(("127.0.0.1", 0)) as server:
            handle, address = server.fileno(), str(server.getsockname()[1])
            ranks = [
                subprocess.Popen(
                    command if self.processes == 1 else [*command, str(rank), address, str(handle)],
                    env=environment,
                    stdout=subprocess.PIPE,
                    text=True,
                    pass_fds=() if rank or self.processes == 1 else (handle,),
                )
                for rank in range(count)
            ]
        try:
            outputs = [rank.communicate(timeout=RANK_SECONDS)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if any(rank.returncode for rank in ranks):
            raise RuntimeError(f"{self.name}: a process failed; see its messages above")
        return [json.loads(output.splitlines()[-1]) for output in outputs]


def torch_threads() -> int:
    """Return the CPU threads of this process."""
    import torch

    return torch.get_num_threads()


def make_update(case: Case, workers: Workers = SINGLE) -> tuple[Any, Callable[[], None], Any]:
    """Return a random model, a function that updates it, and the experience of a step. ``workers``: the ranks that share it."""
    import transformers

    from benchmarks.update import make_experience
    from quartet.models.training.activation_checkpointing import activation_checkpointing
    from quartet.models.training.optimizer import MasterWeightAdamW, create_optimizer
    from quartet.models.training.updates import update_policy, update_value
    from quartet.models.value_head import ValueModel
    from quartet.models.weights.loading import DTYPES
    from quartet.models.weights.lora import add_adapter
    from quartet.services.orchestrator.algorithm.update_request import optimization_at, policy_loss_of, value_loss_of

    config, description = case.config(), case.description()
    settings = transformers.AutoConfig.for_model(description.pop("model_type"), **description)
    model: Any = transformers.AutoModelForCausalLM.from_config(settings, dtype=DTYPES[case.dtype]).eval()
    whole: list[Any] = []
    if case.role == "critic":
        model = ValueModel.of_causal_lm(model)
        whole += model.head.parameters()
    if case.rank:
        adapter = add_adapter(
            model.backbone if case.role == "critic" else model, "base", LoraConfig(rank=case.rank, alpha=16.0)
        )
        whole += adapter.parameters()
    experience = make_experience(config, model, full=True)
    kind: Any = MasterWeightAdamW
    if workers.size > 1:
        from quartet.models.workers.group import WorkerGroup
        from quartet.models.workers.sharding import ShardedAdamW, shard_model

        assert isinstance(workers, WorkerGroup)
        shard_model(model, workers, whole)
        kind = partial(ShardedAdamW, workers=workers)
    optimizer = create_optimizer(model, 1e-4, kind=kind)
    trained = config.actor if case.role == "actor" else config.critic
    optimization = optimization_at(config, trained, STEP)

    def update() -> None:
        with activation_checkpointing(model, case.checkpointing):
            if case.role == "actor":
                loss = policy_loss_of(config.algorithm, config.rollout)
                update_policy(model, optimizer, experience, optimization, loss, case.tokens, workers=workers)
            else:
                value_loss = value_loss_of(config.algorithm)
                update_value(model, optimizer, experience, optimization, value_loss, case.tokens, workers)

    return model, update, experience


def measure(case: Case, workers: Workers) -> dict[str, float]:
    """Measure the peak memory of the second update: of tensors, and of the process above its memory before the model was made;
    or, with the variable ROUNDS, the seconds of an update and the bytes/s of collectives.

    A small model of the same kind first makes what the libraries keep for the process.
    """
    small = replace(case, hidden=128, layers=1, vocabulary=128, tokens=64, responses=2, prompt=4, response=8)
    make_update(small, workers)[1]()
    if rounds := int(os.environ.get("ROUNDS", "0")):
        update = make_update(case, workers)[1]
        link = {"link": _link(workers, rounds)} if workers.size > 1 else {}
        return {"seconds": seconds_of(update, rounds), **link}
    resident = _resident_peak(case, workers)
    return {"bytes": _tensor_peak(case, workers), "resident": resident}


def _tensor_peak(case: Case, workers: Workers) -> float:
    """Return the most bytes that torch has allocated at a time during the second update of a new model."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _, update, _ = make_update(case, workers)
        update()
        # The complete model that was sharded may be in a cycle.
        gc.collect()
        start = time.time_ns()
        update()
    live: dict[int, int] = {}
    total = peak = 0
    for moment, pointer, size in sorted(_allocations(profiler.profiler.kineto_results.experimental_event_tree())):
        # Blocks that another thread frees, such as gloo's, end without an event.
        total -= live.pop(pointer, 0)
        if size > 0:
            live[pointer] = size
            total += size
        if moment >= start:
            peak = max(peak, total)
    return peak


def _allocations(events: Any) -> Iterator[tuple[int, int, int]]:
    """Yield the time in ns, the address, and the size of every allocation. The size is negative if memory is freed."""
    stack = list(events)
    while stack:
        event = stack.pop()
        stack += event.children
        if "Allocation" in str(event.tag):
            yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size


def _resident_peak(case: Case, workers: Workers) -> float:
    """Return the peak of resident memory during the second update of a new model, above that before the model was made."""
    before = _status("VmRSS")
    _, update, _ = make_update(case, workers)
    update()
    Path("/proc/self/clear_refs").write_text("5")
    update()
    return _status("VmHWM") - before


def _link(workers: Workers, rounds: int) -> float:
    """Return the bytes/s that a rank receives while all parts of a tensor are gathered."""
    import torch
    import torch.distributed as dist

    part = torch.zeros(2**22)
    result = torch.empty(workers.size * len(part))
    return (workers.size - 1) * part.nbytes / seconds_of(lambda: dist.all_gather_into_tensor(result, part), rounds)


def _status(name: str) -> float:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * float(lines[name].split()[0])


def seconds_of(function: Callable[[], Any], rounds: int) -> float:
    """Return the shortest of several durations, because other work on the machine only adds to them."""
    function()
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best


def main(case: Case, rank: int = 0, port: int = 0, handle: int = 0) -> None:
    """Print the measurements of one process."""
    if case.processes == 1:
        print(json.dumps(measure(case, SINGLE)))
        return
    from quartet.models.workers.group import join_group

    print(json.dumps(measure(case, join_group(rank, case.processes, ("127.0.0.1", port), None if rank else handle))))
    sys.stdout.flush()
    # A thread of gloo may still release the tensors of the last collective. It needs the interpreter for that, and aborts the
    # process if the interpreter is being finalized.
    os._exit(0)


if __name__ == "__main__":
    main(Case(**json.loads(sys.argv[1])), *map(int, sys.argv[2:]))
