"""Sessions for tests: a real server and a real engine, and agents that are functions of this process."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import tokenizers
import transformers

from quartet.contract.agent import AgentResult, AgentRun
from quartet.contract.generation import EpisodeSettings, GenerationBatch, GenerationRequest, SamplingParameters
from quartet.contract.trajectory import Outcome, Trajectory, TrajectoryId
from quartet.data.chat_template import NO_INPUTS
from quartet.engines.engine import EngineResponse, ServedModel, TurnSource
from quartet.engines.request_checks import check_response
from quartet.errors import QuartetError
from quartet.models.generation.torch_engine import TorchEngine
from quartet.services.generator.sessions.app import SessionServer
from quartet.services.generator.sessions.sessions import AgentAccess, generate_sessions
from quartet.services.generator.sessions.texts import PolicyTexts
from tests.unit.models import tiny

TEMPLATE = """{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}
{%- if message.reasoning_content and (loop.last or keep_thinking) %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""ChatML with tools. Reasoning is written for the last message only, unless ``keep_thinking`` is given."""
EOS = "<|im_end|>"
CORPUS = ["the quick brown fox jumps over the lazy dog", "assistant system user tool call answer", "one two three"]

Agent = Callable[[AgentRun], AgentResult]
Script = Callable[[str], str]
"""Function that returns the answer to a prompt; an end token is added, or it repeats up to the limit after "…"."""


def make_tokenizer() -> Any:
    """Return a byte-level tokenizer with a chat template."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|pad|>", EOS, "<|im_start|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(CORPUS, trainer)
    result = transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token=EOS, pad_token="<|pad|>")
    result.chat_template = TEMPLATE
    return result


class Agents:
    """Agents that are functions, 64 at once. ``runs`` are those that were started, ``errors`` those that agents have raised."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._threads = ThreadPoolExecutor(64, "agents")
        self.runs: list[AgentRun] = []
        self.errors: list[BaseException] = []
        self.cancelled = 0

    def start(self, run: AgentRun, on_end: Callable[[AgentResult | QuartetError], None]) -> Callable[[], None]:
        self.runs.append(run)

        def work() -> None:
            try:
                on_end(self._agent(run))
            except BaseException as error:
                self.errors.append(error)
                on_end(AgentResult.failed(Outcome.ENVIRONMENT_ERROR, type(error).__name__))

        self._threads.submit(work)

        def cancel() -> None:
            self.cancelled += 1

        return cancel

    def close(self) -> None:
        self._threads.shutdown()


class ScriptedEngine:
    """Engine that answers as a function of the prompt's text. ``prompts`` are all that it got, as ids."""

    def __init__(self, tokenizer: Any, script: Script) -> None:
        self._tokenizer, self._script = tokenizer, script
        self.requests: list[GenerationRequest] = []

    def generate_turns(
        self,
        requests: Sequence[GenerationRequest],
        sampling: SamplingParameters,
        seed: int,
        cancelled: Callable[[], bool],
        turns: TurnSource,
    ) -> Iterator[EngineResponse]:
        while turns.open:
            if cancelled():
                return
            for request in turns.take(wait=True):
                self.requests.append(request)
                text = self._script(self._tokenizer.decode(request.prompt_ids))
                ids = self._tokenizer(text.removesuffix("…"), add_special_tokens=False)["input_ids"]
                if not text.endswith("…"):
                    ids = [*ids, self._tokenizer.eos_token_id]
                limit = request.own_sampling(sampling).max_response_tokens
                ids = (ids * limit if text.endswith("…") else ids)[:limit]
                yield EngineResponse(request, ids, [-0.5 - index % 100 / 100 for index in range(len(ids))])


@dataclass
class Rig:
    """A server, an engine and its tokenizer. ``play`` generates the episodes of a batch with an agent."""

    server: SessionServer
    tokenizer: Any
    engine: Any
    served: ServedModel
    records: Callable[[GenerationBatch], Any]
    max_branches: int = 16
    max_tokens: int | None = None
    max_prompt_tokens: int = 200
    max_open: int = 64
    max_attempts: Callable[[Outcome], int] = lambda outcome: 1
    agents: Agents | None = None
    turns: Counter[str] = field(default_factory=Counter)

    @property
    def base_url(self) -> str:
        return f"http://{self.server.address}/v1"

    def access(self, agents: Any) -> AgentAccess:
        size, stops = self.served.vocabulary_size, self.served.stop_ids
        return AgentAccess(
            self.server,
            agents,
            PolicyTexts(self.tokenizer, size, stops, NO_INPUTS),
            self.records,
            self.base_url,
            self.max_open,
            self.max_branches,
            self.max_tokens,
            self.max_prompt_tokens,
            self.served.max_sequence_tokens,
            self.max_attempts,
        )

    def batch(
        self, run: str, episodes: int = 1, max_turns: int = 8, limit: int = 64, **changes: Any
    ) -> GenerationBatch:
        prompt = np.array(self.tokenizer("one two")["input_ids"], np.int32)
        requests = [GenerationRequest(TrajectoryId(run, 3, index, 0), prompt) for index in range(episodes)]
        fields = {index: json.dumps({"number": index}) for index in range(episodes)}
        settings = EpisodeSettings(max_turns, changes.pop("max_turn_tokens", 0), fields)
        sampling = SamplingParameters(limit)
        batch = GenerationBatch(run, 3, 1, requests, sampling, 5, 2, b"d" * 16, "me:1", 4, settings)
        return replace(batch, **changes)

    def play(
        self, batch: GenerationBatch, agent: Agent, cancelled: Callable[[], bool] = lambda: False
    ) -> list[Trajectory]:
        """Generate the episodes of ``batch`` and return them, ordered by id. Raises the first error of an agent."""
        finished: list[Trajectory] = []
        agents, counted = Agents(agent), Counter[str]()
        self.agents = agents

        def generate_turns(prompts: Sequence[GenerationRequest], turns: TurnSource) -> Iterator[Trajectory]:
            responses = self.engine.generate_turns(prompts, batch.sampling, batch.seed, cancelled, turns)
            for response in responses:
                turn = check_response(response, self.served, batch.sampling, batch.policy_version, "test")
                yield replace(turn, weights_digest=batch.weights_digest, generator=batch.generator)

        try:
            generate_sessions(
                self.access(agents),
                batch,
                batch.requests,
                lambda requests: iter(()),
                generate_turns,
                finished.append,
                cancelled,
                counted,
            )
        finally:
            self.turns = Counter(counted)
            agents.close()
        return sorted(finished, key=lambda trajectory: trajectory.id)

    def checked(self, batch: GenerationBatch, agent: Agent) -> list[Trajectory]:
        """As ``play``, and raise the error of an agent."""
        result = self.play(batch, agent)
        assert self.agents is not None
        for error in self.agents.errors:
            raise error
        return result

    def text(self, ids: Any) -> str:
        return str(self.tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def torch_rig(server: SessionServer, tokenizer: Any, records: Any, positions: int = 512) -> Rig:
    """Return a rig with a random llama. Its engine is Quartet's."""
    vocabulary = len(tokenizer)
    model = tiny.causal("llama", max_position_embeddings=positions, vocab_size=vocabulary)
    stops = frozenset({tokenizer.eos_token_id, *range(40, 60)})
    engine = TorchEngine(model, stops, 64)
    return Rig(server, tokenizer, engine, engine._served, records)


def scripted_rig(server: SessionServer, tokenizer: Any, records: Any, script: Script) -> Rig:
    """Return a rig whose engine follows a script."""
    served = ServedModel("m", "float32", frozenset({tokenizer.eos_token_id}), len(tokenizer), 100_000)
    return Rig(server, tokenizer, ScriptedEngine(tokenizer, script), served, records, max_prompt_tokens=2000)


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition does not hold in time"
        threading.Event().wait(0.01)
