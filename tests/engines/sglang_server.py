"""An HTTP server with the interface of SGLang 0.5.23, for tests without a GPU. It generates with transformers.

Like SGLang, it keeps its prefix cache until the cache is flushed, ignores seeds without --enable-deterministic-inference, repeats
all tokens in each event without --incremental-streaming-output, stops at its checkpoint's EOS, ignores stop_token_ids with
the EOS, generates until a request is aborted or its connection ends, and holds new requests back while it is paused. Paused in
place, running requests wait for the next token, and keep their keys and values.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import fastapi
import peft
import torch
import transformers
import uvicorn
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel

PAGE = 16
"""Tokens of a page of the prefix cache."""


class Sampling(BaseModel):
    """Sampling parameters of /generate, with SGLang's defaults."""

    max_new_tokens: int = 128
    stop_token_ids: set[int] | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    top_k: int = -1
    ignore_eos: bool = False
    stream_interval: int | None = None
    sampling_seed: int | None = None


class Generate(BaseModel):
    """Body of /generate."""

    rid: str = ""
    input_ids: list[int]
    sampling_params: Sampling
    return_logprob: bool = False
    top_logprobs_num: int = 0
    stream: bool = False
    lora_path: str | None = None
    cache_salt: str | None = None


class FromDisk(BaseModel):
    """Body of /update_weights_from_disk."""

    model_path: str
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class Version(BaseModel):
    """Body of /update_weight_version."""

    new_version: str
    abort_all_requests: bool = True


class Pause(BaseModel):
    """Body of /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class Abort(BaseModel):
    """Body of /abort_request."""

    rid: str = ""
    abort_all: bool = False


class Adapter(BaseModel):
    """Body of /load_lora_adapter and /unload_lora_adapter."""

    lora_name: str
    lora_path: str = ""


@dataclass
class Launch:
    """Arguments of the server."""

    model_path: Path
    api_key: str | None = None
    enable_deterministic_inference: bool = False
    incremental_streaming_output: bool = False
    enable_lora: bool = False
    dtype: str = "auto"
    context_length: int | None = None
    original_log_probs: bool = False
    """The environment variable SGLANG_RETURN_ORIGINAL_LOGPROB."""


@dataclass
class State:
    """State of the server."""

    model: Any
    version: str = "default"
    adapters: dict[str, str] = field(default_factory=dict)
    running: dict[str, bool] = field(default_factory=dict)
    """Ids of the requests, and whether each was aborted."""
    cache: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    """Keys and values of a prompt's full pages, by adapter, salt and tokens."""
    resumed: asyncio.Event = field(default_factory=asyncio.Event)
    tokens: int = 0
    """Number of tokens that were generated."""


class SGLangServer:
    """The server, in a thread."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.state = State(_load(launch.model_path))
        self.state.resumed.set()
        self._server = uvicorn.Server(uvicorn.Config(self._app(), port=0, log_level="warning"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    @property
    def url(self) -> str:
        """Address of the server."""
        return f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    def start(self) -> None:
        """Start, and wait until the server listens."""
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.01)

    def stop(self) -> None:
        """Stop at once: connections end in the middle of a response."""
        self._server.force_exit = self._server.should_exit = True
        self._thread.join()

    def _app(self) -> fastapi.FastAPI:
        app, launch, state = fastapi.FastAPI(), self.launch, self.state

        @app.middleware("http")
        async def authenticate(request: fastapi.Request, call_next: Any) -> Response:
            if launch.api_key and request.headers.get("authorization") != f"Bearer {launch.api_key}":
                return JSONResponse({"error": "Unauthorized"}, 401)
            answer: Response = await call_next(request)
            return answer

        @app.get("/server_info")
        async def server_info() -> dict[str, Any]:
            names = ("enable_deterministic_inference", "incremental_streaming_output", "enable_lora", "dtype")
            return {name: getattr(launch, name) for name in names} | {
                "context_length": launch.context_length,
                "version": "0.5.23",
            }

        @app.get("/model_info")
        async def model_info() -> dict[str, Any]:
            return {"model_path": str(launch.model_path), "is_generation": True, "weight_version": state.version}

        @app.post("/generate")
        async def generate(body: Generate) -> Response:
            events = self._generate(body)
            if body.stream:
                return StreamingResponse(_sent(events), media_type="text/event-stream")
            try:
                return JSONResponse([event async for event in events][-1])
            except ValueError as error:
                return JSONResponse({"error": {"message": str(error)}}, 400)

        @app.post("/abort_request")
        async def abort_request(body: Abort) -> Response:
            self._abort(None if body.abort_all else body.rid)
            return Response()

        @app.post("/pause_generation")
        async def pause_generation(body: Pause) -> dict[str, str]:
            state.resumed.clear()
            if body.mode == "abort":
                self._abort(None)
                while state.running:
                    await asyncio.sleep(0.01)
            return {"status": "ok"}

        @app.post("/continue_generation")
        async def continue_generation() -> dict[str, str]:
            state.resumed.set()
            return {"status": "ok"}

        @app.post("/update_weight_version")
        async def update_weight_version(body: Version) -> dict[str, Any]:
            state.version = body.new_version
            return {"success": True, "new_version": body.new_version}

        @app.post("/update_weights_from_disk")
        async def update_weights_from_disk(body: FromDisk) -> JSONResponse:
            try:
                state.model = _load(Path(body.model_path))
            except (OSError, ValueError) as error:
                return _result(f"Failed to get weights iterator: {error}.")
            if body.weight_version is not None:
                state.version = body.weight_version
            if body.flush_cache and not self._flush():
                return _result(
                    "Weights were updated, but the cache was not flushed because requests are still running."
                )
            return _result("")

        @app.post("/flush_cache")
        async def flush_cache() -> Response:
            return Response(status_code=200 if self._flush() else 400)

        @app.post("/load_lora_adapter")
        async def load_lora_adapter(body: Adapter) -> JSONResponse:
            if not launch.enable_lora:
                return _result("LoRA is not enabled. Please set `--enable-lora` to enable LoRA.")
            if not (Path(body.lora_path) / "adapter_config.json").is_file():
                return _result(f"{body.lora_path} is not an adapter")
            state.adapters[body.lora_name] = body.lora_path
            return _result("")

        @app.post("/unload_lora_adapter")
        async def unload_lora_adapter(body: Adapter) -> JSONResponse:
            return _result("" if state.adapters.pop(body.lora_name, None) else "not loaded")

        return app

    def _abort(self, rid: str | None) -> None:
        for running in self.state.running:
            if rid in (None, running):
                self.state.running[running] = True

    def _flush(self) -> bool:
        if self.state.running:
            return False
        self.state.cache.clear()
        return True

    async def _generate(self, body: Generate) -> AsyncIterator[dict[str, Any]]:
        """Yield one output per stream_interval tokens, and the last one."""
        state, sampling = self.state, body.sampling_params
        if sampling.top_k == 0 or not 0 < sampling.top_p <= 1:
            raise ValueError(f"top_k must be -1 (disable) or at least 1, got {sampling.top_k}.")
        await state.resumed.wait()
        adapted = None
        if body.lora_path is not None:
            if body.lora_path not in state.adapters:
                raise ValueError(f"Got LoRA adapter that has never been loaded: {body.lora_path}")
            adapted = peft.PeftModel.from_pretrained(copy.deepcopy(state.model), state.adapters[body.lora_path]).eval()
        rid = body.rid or os.urandom(8).hex()
        state.running[rid] = False
        ids: list[int] = []
        log_probs: list[tuple[float, int, None]] = []
        top: list[list[tuple[float, int, None]]] = []
        versions: list[str] = []
        sent, reason = 0, None
        try:
            cache, length = self._cached(adapted or state.model, body)
            while reason is None:
                while not state.resumed.is_set() and not state.running[rid]:
                    await asyncio.sleep(0.01)
                model = adapted or state.model
                versions.append(state.version)
                with torch.no_grad():
                    logits = model(
                        input_ids=torch.tensor([[*body.input_ids, *ids][length:]]),
                        past_key_values=cache,
                        use_cache=True,
                    ).logits[0, -1]
                length = len(body.input_ids) + len(ids)
                token, whole = self._next(logits, sampling, length)
                ids.append(token)
                state.tokens += 1
                log_probs.append((float(whole[token]), token, None))
                if body.top_logprobs_num:
                    values, indices = whole.topk(body.top_logprobs_num)
                    top.append([(float(v), int(i), None) for v, i in zip(values, indices, strict=True)])
                await asyncio.sleep(0)
                reason = self._reason(rid, ids, model, sampling)
                if reason is not None or len(ids) - sent >= (sampling.stream_interval or 1):
                    start = sent if self.launch.incremental_streaming_output and body.stream else 0
                    yield self._output(body, rid, ids, log_probs[start:], top[start:], reason, start, versions)
                    sent = len(ids)
        finally:
            del state.running[rid]

    def _output(
        self,
        body: Generate,
        rid: str,
        ids: list[int],
        log_probs: list[Any],
        top: list[Any],
        reason: dict[str, Any] | None,
        start: int,
        versions: list[str],
    ) -> dict[str, Any]:
        first = [index for index in range(len(ids)) if not index or versions[index] != versions[index - 1]]
        spans = [
            {"version": versions[begin], "start": begin, "end": end} for begin, end in pairwise([*first, len(ids)])
        ]
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": reason,
            "prompt_tokens": len(body.input_ids),
            "completion_tokens": len(ids),
            "weight_version": self.state.version,
            "weight_versions": spans,
        }
        if body.return_logprob:
            meta |= {"output_token_logprobs": log_probs, "output_token_logprobs_length": len(log_probs)}
        if body.top_logprobs_num:
            meta["output_top_logprobs"] = top
        return {"text": "", "output_ids": ids[start:], "meta_info": meta}

    def _cached(self, model: Any, body: Generate) -> tuple[Any, int]:
        """Return keys and values of the prompt's full pages, of former weights if they were not flushed, and their length."""
        length = (len(body.input_ids) - 1) // PAGE * PAGE
        if not length:
            return transformers.DynamicCache(), 0
        key = (body.lora_path, body.cache_salt, *body.input_ids[:length])
        if key not in self.state.cache:
            cache = transformers.DynamicCache()
            with torch.no_grad():
                model(input_ids=torch.tensor([body.input_ids[:length]]), past_key_values=cache, use_cache=True)
            self.state.cache[key] = cache
        return copy.deepcopy(self.state.cache[key]), length

    def _next(self, logits: torch.Tensor, sampling: Sampling, position: int) -> tuple[int, torch.Tensor]:
        """Return the next token, and the log-probs of the whole distribution that the server reports."""
        if sampling.temperature == 0:
            whole = torch.log_softmax(logits, -1)
            return int(whole.argmax()), whole
        whole = torch.log_softmax(logits / sampling.temperature, -1)
        probabilities, order = whole.exp().sort(descending=True)
        kept = probabilities.clone()
        kept[probabilities.cumsum(0) - probabilities > sampling.top_p] = 0
        if sampling.top_k > 0:
            kept[sampling.top_k :] = 0
        kept[probabilities < sampling.min_p * probabilities[0]] = 0
        generator = None
        if self.launch.enable_deterministic_inference:
            seed = 42 if sampling.sampling_seed is None else sampling.sampling_seed
            generator = torch.Generator().manual_seed((seed * 1_000_003 + position) % 2**63)
        token = int(order[torch.multinomial(kept, 1, generator=generator)])
        return token, torch.log_softmax(logits, -1) if self.launch.original_log_probs else whole

    def _reason(self, rid: str, ids: list[int], model: Any, sampling: Sampling) -> dict[str, Any] | None:
        if self.state.running[rid]:
            return {"type": "abort", "message": "Aborted"}
        stops = {model.config.eos_token_id} | (sampling.stop_token_ids or set())
        if not sampling.ignore_eos and ids[-1] in stops:
            return {"type": "stop", "matched": ids[-1]}
        if len(ids) >= sampling.max_new_tokens:
            return {"type": "length", "length": len(ids)}
        return None


async def _sent(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    try:
        async for event in events:
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
    except ValueError as error:
        content = {"error": {"message": str(error), "type": "invalid_request_error", "code": 400}}
        yield b"data: " + json.dumps(content).encode() + b"\n\n"
    yield b"data: [DONE]\n\n"


def _result(message: str) -> JSONResponse:
    """Return SGLang's answer to a control request: success if there is no message."""
    return JSONResponse({"success": not message, "message": message}, 400 if message else 200)


def _load(folder: Path) -> Any:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return model.eval()
