"""A real tritonserver, from the wheel nvidia-pytriton, on separate ports on loopback."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.ports import free_port

MODEL = Path(__file__).with_name("served_model.py")
PYTHON = "QUARTET_TRITON_PYTHON"
"""Variable with the path of a Python that has the wheel, the dependencies of the model, and NumPy below 2 for the wheel."""
START_TIMEOUT = 120.0
"""Seconds until the server and its models must be ready."""

TOKEN_INPUTS = {
    "input_ids": ("INT32", "-1", False),
    "input_lengths": ("INT32", "1", False),
    "request_output_len": ("INT32", "1", False),
    "end_id": ("INT32", "1", True),
    "pad_id": ("INT32", "1", True),
    "stop_words_list": ("INT32", "2, -1", True),
    "temperature": ("FP32", "1", True),
    "runtime_top_k": ("INT32", "1", True),
    "runtime_top_p": ("FP32", "1", True),
    "return_log_probs": ("BOOL", "1", True),
    "streaming": ("BOOL", "1", True),
    "lora_task_id": ("UINT64", "1", True),
    "lora_weights": ("FP32", "-1, -1", True),
    "lora_config": ("INT32", "-1, 3", True),
}
TOKEN_OUTPUTS = {"output_ids": ("INT32", "-1, -1"), "sequence_length": ("INT32", "-1")}
LOG_PROBS = {"output_log_probs": ("FP32", "-1, -1")}
TEXT_INPUTS = {
    "text_input": ("STRING", "-1", False),
    "sampling_param_max_tokens": ("INT32", "1", True),
    "sampling_param_temperature": ("FP32", "1", True),
    "sampling_param_top_k": ("INT32", "1", True),
    "sampling_param_top_p": ("FP32", "1", True),
    "sampling_param_seed": ("UINT64", "1", True),
    "return_finish_reason": ("BOOL", "1", True),
    "return_stop_reason": ("BOOL", "1", True),
    "streaming": ("BOOL", "1", True),
    "lora_id": ("UINT64", "1", True),
    "lora_name": ("STRING", "1", True),
    "lora_path": ("STRING", "1", True),
}
TEXT_OUTPUTS = dict.fromkeys(("text_output", "finish_reason", "stop_reason"), ("STRING", "-1"))
VLLM_FLAGS = (
    "stream",
    "exclude_input_in_output",
    "return_finish_reason",
    "return_cumulative_logprob",
    "return_logprobs",
    "return_num_input_tokens",
    "return_num_output_tokens",
)
VLLM_INPUTS = {
    "text_input": ("STRING", "1", False),
    "sampling_parameters": ("STRING", "1", True),
    **dict.fromkeys(VLLM_FLAGS, ("BOOL", "1", True)),
}
VLLM_OUTPUTS = {
    **dict.fromkeys(("text_output", "finish_reason", "logprobs"), ("STRING", "-1")),
    "cumulative_logprob": ("FP32", "-1"),
    "num_input_tokens": ("UINT32", "1"),
    "num_output_tokens": ("UINT32", "-1"),
}


@dataclass(frozen=True)
class Model:
    """A served model and its tensors. ``names``: the set of tensor names: current, older, text or vllm."""

    name: str
    names: str = "current"
    decoupled: bool = True
    log_probs: str = "yes"
    without: tuple[str, ...] = ()


def is_available() -> bool:
    """Return whether server and client are installed."""
    return PYTHON in os.environ and importlib.util.find_spec("tritonclient") is not None


@dataclass
class TritonServer:
    """Server of ``models`` with a ``checkpoint``. ``folder``: its files. ``tls``: a folder with tls.crt, tls.key and ca.crt.

    ``lazy``: load a model when ``load`` is called. Each model is a process that imports torch, which takes seconds.
    """

    folder: Path
    checkpoint: Path
    models: tuple[Model, ...]
    tls: Path | None = None
    lazy: bool = False
    port: int = field(default=0, init=False)
    loaded: set[str] = field(default_factory=set, init=False)

    def start(self, port: int | None = None) -> None:
        """Start the server, and wait until all models are ready."""
        python = Path(os.environ[PYTHON]).absolute()
        version, wheel = _wheel(python)
        backends = self.folder / "backends"
        if not backends.exists():  # Stubs of a killed server may still run from this folder.
            shutil.copytree(wheel / "tritonserver" / "backends", backends)
            stub = wheel / "tritonserver" / "python_backend_stubs" / version / "triton_python_backend_stub"
            shutil.copy(stub, backends / "python")
            (backends / "python" / "triton_python_backend_stub").chmod(0o755)
            for model in self.models:
                self._write(model)
        self.port = port or free_port()
        arguments = [
            str(wheel / "tritonserver" / "bin" / "tritonserver"),
            f"--model-repository={self.folder / 'repository'}",
            f"--backend-directory={backends}",
            f"--backend-config=python,shm-region-prefix-name=quartet{self.port}-",
            f"--grpc-port={self.port}",
            "--grpc-address=127.0.0.1",
            "--disable-auto-complete-config",
            "--allow-http=false",
            "--allow-metrics=false",
            "--model-control-mode=explicit",
            *([] if self.lazy else [f"--load-model={model.name}" for model in self.models]),
        ]
        if self.tls is not None:
            arguments += [
                "--grpc-use-ssl=true",
                "--grpc-use-ssl-mutual=true",
                f"--grpc-server-cert={self.tls / 'tls.crt'}",
                f"--grpc-server-key={self.tls / 'tls.key'}",
                f"--grpc-root-cert={self.tls / 'ca.crt'}",
            ]
        # The backend embeds the distribution's Python, which ignores PYTHONPATH and uses the packages of the first python3.
        environment = os.environ | {
            "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", "")]),
            "LD_LIBRARY_PATH": str(wheel.parent / "nvidia_pytriton.libs"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self.log = (self.folder / "server.log").open("wb")
        (wheel / "tritonserver" / "bin" / "tritonserver").chmod(0o755)
        self.process = subprocess.Popen(
            arguments, env=environment, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._wait()

    def load(self, name: str) -> None:
        """Load a model of a lazy server, if it is not loaded yet."""
        if not self.lazy or name in self.loaded or name not in {model.name for model in self.models}:
            return
        import tritonclient.grpc

        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{self.port}") as client:
            client.load_model(name, client_timeout=START_TIMEOUT)
        self.loaded.add(name)

    def count(self, name: str) -> int:
        """Return the number of ``tokens`` that the models computed, or of ``adapters`` that they received."""
        path = self.folder / name
        return path.stat().st_size if path.exists() else 0

    def stop(self, number: int = signal.SIGKILL) -> None:
        """Stop the server and its child processes."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)
        self.process.wait()
        self.log.close()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT
        ready = self.folder / "server.log"
        while b"Started GRPCInferenceService" not in ready.read_bytes():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"tritonserver did not start:\n{ready.read_text(errors='replace')[-4000:]}")
            time.sleep(0.05)

    def _write(self, model: Model) -> None:
        target = self.folder / "repository" / model.name
        (target / "1").mkdir(parents=True, exist_ok=True)
        shutil.copy(MODEL, target / "1" / "model.py")
        (target / "config.pbtxt").write_text(self._config(model))

    def _config(self, model: Model) -> str:
        if model.names == "text":
            inputs, outputs = dict(TEXT_INPUTS), dict(TEXT_OUTPUTS)
        elif model.names == "vllm":
            inputs, outputs = dict(VLLM_INPUTS), dict(VLLM_OUTPUTS)
        else:
            inputs, outputs = dict(TOKEN_INPUTS), dict(TOKEN_OUTPUTS)
            outputs |= LOG_PROBS if model.log_probs == "yes" else {}
            inputs["random_seed" if model.names == "older" else "seed"] = ("UINT64", "1", True)
            if model.names == "current":
                inputs["exclude_input_in_output"] = ("BOOL", "1", True)
        parameters = {
            "names": model.names,
            "log_probs": model.log_probs,
            "checkpoint": str(self.checkpoint),
            "counts": str(self.folder),
        }
        batch = 0 if model.names == "vllm" else 8
        lines = [f'name: "{model.name}"', 'backend: "python"', f"max_batch_size: {batch}"]
        lines.append(f"model_transaction_policy {{ decoupled: {str(model.decoupled).lower()} }}")
        lines += [
            f'input {{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] optional: {str(optional).lower()} }}'
            for name, (kind, dims, optional) in inputs.items()
            if name not in model.without
        ]
        lines += [
            f'output {{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ] }}'
            for name, (kind, dims) in outputs.items()
        ]
        lines += [
            f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in parameters.items()
        ]
        lines.append("instance_group { count: 1 kind: KIND_CPU }")
        return "\n".join(lines) + "\n"


def _wheel(python: Path) -> tuple[str, Path]:
    """Return the version of a Python, and the path of its pytriton."""
    code = "import sys, sysconfig; print('%d.%d' % sys.version_info[:2], sysconfig.get_path('purelib'))"
    result = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    return result[0], Path(result[1]) / "pytriton"
