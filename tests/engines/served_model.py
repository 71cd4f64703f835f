"""A model for Triton's Python backend with the tensors of the TensorRT-LLM backend or vLLM's. It generates with transformers.

Runs inside a real tritonserver, as model.py. Parameters in config.pbtxt select the tensor names. A prompt whose first token is in
FAULTS, or VLLM_FAULTS, causes that fault.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import numpy as np
import torch
import transformers
import triton_python_backend_utils as pb_utils

FAULTS = {60: "crash", 59: "error", 58: "nothing", 57: "hang", 56: "cut", 55: "nan", 0: "endless"}
VLLM_FAULTS = {60: "several", 59: "error", 58: "nothing", 57: "hang", 56: "cut", 55: "nan", 0: "miscount"}
MODULES = {
    1: "self_attn.q_proj",
    2: "self_attn.k_proj",
    3: "self_attn.v_proj",
    4: "self_attn.o_proj",
    5: "mlp.gate_proj",
    6: "mlp.down_proj",
    7: "mlp.up_proj",
}


class TritonPythonModel:
    """Class with the interface of Triton's Python backend."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self.parameters = {name: entry["string_value"] for name, entry in config["parameters"].items()}
        self.decoupled = config["model_transaction_policy"]["decoupled"]
        torch.set_num_threads(1)
        self.model = self._load()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(self.parameters["checkpoint"])
        self.adapted: dict[int, Any] = {}

    def _load(self) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(self.parameters["checkpoint"]).eval()

    def execute(self, requests: list[Any]) -> list[Any] | None:
        if self.decoupled:
            for request in requests:
                self._stream(request)
            return None
        return [self._answer(request) for request in requests]

    def _stream(self, request: Any) -> None:
        sender = request.get_response_sender()
        generate = self._generate_as_vllm if self.parameters["names"] == "vllm" else self._generate
        try:
            for tensors in generate(request, sender.is_cancelled):
                sender.send(pb_utils.InferenceResponse(tensors))
        except pb_utils.TritonModelException as error:
            sender.send(pb_utils.InferenceResponse([], pb_utils.TritonError(str(error))))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _answer(self, request: Any) -> Any:
        try:
            return pb_utils.InferenceResponse(list(self._generate(request, request.is_cancelled))[-1])
        except pb_utils.TritonModelException as error:
            return pb_utils.InferenceResponse([], pb_utils.TritonError(str(error)))

    def _generate(self, request: Any, cancelled: Any) -> Any:
        """Yield the output tensors: one list per token, or a single list at the end."""
        text = self.parameters["names"] == "text"
        parsed = self._text_request(request) if text else self._token_request(request)
        fault = FAULTS.get(parsed["prompt"][0])
        if fault == "crash":
            os._exit(1)
        if fault == "error":
            raise pb_utils.TritonModelException("out of memory")
        if fault == "hang":
            while not cancelled():
                time.sleep(0.01)
            return
        if fault == "nothing":
            yield []
            return
        if fault == "endless":
            parsed |= {"limit": 10**6, "stops": []}
        ids: list[int] = []
        log_probs: list[float] = []
        model = self._with_adapter(request, text)
        generator = torch.Generator().manual_seed(parsed["seed"])
        while len(ids) < parsed["limit"] and not (ids and ids[-1] in parsed["stops"]) and not cancelled():
            token, log_prob = _next(model, parsed, ids, generator)
            ids.append(token)
            log_probs.append(log_prob if fault != "nan" else float("nan"))
            if parsed["streaming"]:
                yield self._tokens([token], log_probs)
            if fault == "cut":
                break
            self._count("tokens")
        if text:
            yield self._text(ids, parsed)
        elif not parsed["streaming"]:
            shown = ids if _value(request, "exclude_input_in_output") else [*parsed["prompt"], *ids]
            yield self._tokens(shown, log_probs)

    def _generate_as_vllm(self, request: Any, cancelled: Any) -> Any:
        """Yield the tensors of each token, as vLLM's backend does: ids only as keys of the log-probs before the temperature."""
        sampling = json.loads(_value(request, "sampling_parameters"))
        if not _value(request, "stream") or not _value(request, "exclude_input_in_output"):
            raise pb_utils.TritonModelException("the test's model streams without the prompt only")
        prompt = self.tokenizer(_value(request, "text_input").decode())["input_ids"]
        parsed = {
            "prompt": prompt,
            "temperature": sampling["temperature"],
            "greedy": sampling["temperature"] == 0,
        }
        stops = [*sampling["stop_token_ids"], *([] if sampling["ignore_eos"] else [self.tokenizer.eos_token_id])]
        fault = VLLM_FAULTS.get(prompt[0])
        if fault == "error":
            raise pb_utils.TritonModelException("out of memory")
        if fault == "nothing":
            yield []
            return
        while fault == "hang" and not cancelled():
            time.sleep(0.01)
        generator = torch.Generator().manual_seed(sampling["seed"])
        ids: list[int] = []
        while not cancelled():
            token, _ = _next(self.model, parsed, ids, generator)
            raw = _next(self.model, {**parsed, "temperature": 1.0, "greedy": False}, ids, generator, token)[1]
            ids.append(token)
            self._count("tokens")
            reason = "stop" if token in stops else "length" if len(ids) == sampling["max_tokens"] else None
            if fault == "cut":
                reason = "abort"
            value = float("nan") if fault == "nan" else raw
            entry = {token: {"logprob": value, "rank": 1, "decoded_token": None}}
            if fault == "several":
                entry[(token + 1) % 61] = {"logprob": -9.0, "rank": 2, "decoded_token": None}
            yield self._vllm_tensors(request, sampling, str(reason), entry, len(prompt) + (fault == "miscount"))
            if reason is not None:
                return

    def _vllm_tensors(self, request: Any, sampling: dict[str, Any], reason: str, entry: Any, prompt: int) -> list[Any]:
        def strings(value: str) -> np.ndarray:
            return np.array([value.encode()], np.object_)

        text = "" if not sampling.get("detokenize", True) else self.tokenizer.decode(list(entry))
        result = [pb_utils.Tensor("text_output", strings(text))]
        if _value(request, "return_finish_reason"):
            result.append(pb_utils.Tensor("finish_reason", strings(reason)))
        if _value(request, "return_logprobs"):
            shown = "null" if sampling.get("logprobs") is None else json.dumps([entry])
            result.append(pb_utils.Tensor("logprobs", strings(shown)))
        if _value(request, "return_num_input_tokens"):
            result.append(pb_utils.Tensor("num_input_tokens", np.array([prompt], np.uint32)))
        return result

    def _count(self, name: str) -> None:
        """Count an event: append a byte to a file that a test can read."""
        with open(os.path.join(self.parameters["counts"], name), "ab") as file:
            file.write(b".")

    def _token_request(self, request: Any) -> dict[str, Any]:
        ids, limit = _array(request, "input_ids"), _value(request, "request_output_len")
        assert ids.shape == (1, _value(request, "input_lengths"))
        stops = _array(request, "stop_words_list")
        if stops is not None:
            assert stops.shape[:2] == (1, 2)
            assert stops[0, 1].tolist() == list(range(1, stops.shape[2] + 1)), "each stop word is one token"
        # An end_id would remove a token from the output.
        assert _value(request, "end_id") in (None, -1)
        seed = "random_seed" if self.parameters["names"] == "older" else "seed"
        return {
            "prompt": ids[0].tolist(),
            "limit": limit,
            "stops": [] if stops is None else stops[0, 0].tolist(),
            "temperature": _value(request, "temperature"),
            "greedy": _value(request, "runtime_top_k") == 1,
            "seed": _value(request, seed) % 2**63,
            "streaming": self.decoupled and bool(_value(request, "streaming")),
        }

    def _text_request(self, request: Any) -> dict[str, Any]:
        text = _value(request, "text_input").decode()
        return {
            "prompt": self.tokenizer(text)["input_ids"],
            "limit": _value(request, "sampling_param_max_tokens"),
            "stops": [self.tokenizer.eos_token_id],
            "temperature": _value(request, "sampling_param_temperature"),
            "greedy": _value(request, "sampling_param_top_k") == 1,
            "seed": _value(request, "sampling_param_seed") % 2**63,
            "streaming": False,
        }

    def _tokens(self, ids: list[int], log_probs: list[float]) -> list[Any]:
        # As in the backend: the new tokens, and the log-probs of all tokens so far.
        outputs = {
            "output_ids": np.array([[ids]], np.int32),
            "sequence_length": np.array([[len(ids)]], np.int32),
        }
        if self.parameters["log_probs"] == "yes":
            outputs["output_log_probs"] = np.array([[log_probs]], np.float32)
        return [pb_utils.Tensor(name, value) for name, value in outputs.items()]

    def _text(self, ids: list[int], parsed: dict[str, Any]) -> list[Any]:
        stopped = ids[-1] in parsed["stops"]
        text = self.tokenizer.decode(ids[:-1] if stopped else ids)
        if self.parameters["log_probs"] == "garbled":
            text += " nonsense"
        values = {"text_output": text, "finish_reason": "stop" if stopped else "length", "stop_reason": ""}
        return [pb_utils.Tensor(name, np.array([[value.encode()]], np.object_)) for name, value in values.items()]

    def _with_adapter(self, request: Any, text: bool) -> Any:
        if text:
            path = _value(request, "lora_path")
            return self.model if path is None else self._from_path(_value(request, "lora_id"), path.decode())
        task, weights = _value(request, "lora_task_id"), _array(request, "lora_weights")
        if weights is not None:
            self._count("adapters")
        if task is None:
            return self.model
        if task not in self.adapted:
            if weights is None:
                raise pb_utils.TritonModelException(f"LoRA task {task} not found in cache")
            self.adapted[task] = self._adapt(weights[0], _array(request, "lora_config")[0])
        return self.adapted[task]

    def _adapt(self, weights: np.ndarray, rows: np.ndarray) -> Any:
        model = self._load()
        for row, (module, layer, rank) in zip(weights, rows.tolist(), strict=True):
            linear = model.model.layers[layer].get_submodule(MODULES[module])
            outputs, inputs = linear.weight.shape
            a = torch.from_numpy(row[: rank * inputs].astype(np.float32)).view(rank, inputs)
            b = torch.from_numpy(row[rank * inputs : rank * (inputs + outputs)].astype(np.float32)).view(outputs, rank)
            with torch.no_grad():
                linear.weight += b @ a
        return model

    def _from_path(self, task: int, path: str) -> Any:
        import peft

        if task not in self.adapted:
            self.adapted[task] = peft.PeftModel.from_pretrained(self._load(), path).eval()
        return self.adapted[task]


def _next(
    model: Any, parsed: dict[str, Any], ids: list[int], generator: torch.Generator, given: int | None = None
) -> tuple[int, float]:
    """Return the next token, or the given one, and its log-prob."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*parsed["prompt"], *ids]])).logits[0, -1].double()
    log_probs = torch.log_softmax(logits if parsed["greedy"] else logits / parsed["temperature"], 0)
    if given is not None:
        return given, float(log_probs[given])
    token = log_probs.argmax() if parsed["greedy"] else torch.multinomial(log_probs.exp(), 1, generator=generator)
    return int(token), float(log_probs[token])


def _array(request: Any, name: str) -> Any:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()


def _value(request: Any, name: str) -> Any:
    array = _array(request, name)
    return None if array is None else array.reshape(-1)[0].item() if array.dtype != np.object_ else array.reshape(-1)[0]
