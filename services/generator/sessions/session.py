"""One session: an episode of an agent, from its first request to its result.

Everything here runs on the event loop of the server, except for what takes long: texts, token ids and Redis, on the server's
threads. A session has one turn at a time; further requests wait in order.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from quartet.contract.arrays import IntArray
from quartet.contract.generation import GenerationRequest, SamplingParameters
from quartet.contract.trajectory import (
    Branch,
    FinishReason,
    Segment,
    Trajectory,
    TrajectoryId,
    VersionSpan,
)
from quartet.contract.turn_record import EpisodeRecord, RecordedTurn
from quartet.engines.stop_strings import first_tokens
from quartet.errors import FailedPrecondition
from quartet.services.generator.episodes import merged_spans
from quartet.services.generator.sessions.branching import Branches, Placement, Turn
from quartet.services.generator.sessions.protocol import Call, ChatCall, CompletionCall, ProtocolError, invalid
from quartet.services.generator.sessions.responses import Choice, Header
from quartet.services.generator.sessions.texts import PolicyTexts

Result = TypeVar("Result")
Generate = Callable[[GenerationRequest], Awaitable[Trajectory]]
"""Function that generates one turn."""


class Records(Protocol):
    """The recorded turns of the trajectories of a Generate call. See ``TurnRecords``."""

    def load(self, id: TrajectoryId) -> EpisodeRecord:
        """Return the records of an episode."""

    def append(self, id: TrajectoryId, turn: RecordedTurn) -> bool:
        """Record a turn. Return False if another one is recorded with its index."""

    def forget(self, ids: Iterable[TrajectoryId]) -> None:
        """Remove the records of these episodes."""

    def close(self) -> None:
        """Do not wait any longer for a server that is down."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of an episode.

    ``max_turn_tokens`` 0 and ``max_tokens`` None are no limits. ``max_tokens``: those that the policy generates in all branches.
    ``max_response_tokens``: those of a branch after its prompt. ``max_sequence_tokens``: all of a branch.
    """

    max_turns: int
    max_turn_tokens: int
    max_response_tokens: int
    max_sequence_tokens: int
    max_branches: int
    max_tokens: int | None


def ended() -> ProtocolError:
    """Return the error for the key of an episode that has ended."""
    return ProtocolError(
        401,
        "The episode of this API key has ended. End this agent; each run of it gets a key of its own.",
        "invalid_api_key",
    )


@dataclass(slots=True, eq=False)
class Answer:
    """The answer to a request. ``choices`` are kept until they are delivered; ``Session.choices`` makes them again.

    ``key``: the Idempotency-Key of its request. ``waiting``: number of connections that wait for it. ``begun``: its turns are
    being generated, or are.
    """

    digest: bytes
    key: str | None = None
    task: asyncio.Task[None] | None = None
    waiting: int = 0
    begun: bool = False
    turns: list[Turn] = field(default_factory=list)
    choices: list[Choice] | None = None

    @property
    def delivered(self) -> bool:
        """True if a connection got it."""
        return bool(self.turns) and all(turn.delivered for turn in self.turns)

    @property
    def is_lost(self) -> bool:
        """True if no connection got it and none waits for it."""
        return not self.waiting and not self.delivered


class Session:
    """The requests, branches and records of one attempt of an episode."""

    _whole = "an episode"
    """What errors call it."""

    def __init__(
        self,
        id: TrajectoryId,
        model: str,
        limits: SessionLimits,
        sampling: SamplingParameters,
        greedy: bool,
        texts: PolicyTexts,
        records: Records,
        threads: Executor,
        generate: Generate,
        on_failure: Callable[[BaseException], None],
        counts: Counter[str],
    ) -> None:
        """``generate`` generates a turn. ``on_failure`` receives an error that is no fault of the agent. ``counts``: see
        ``generate_sessions``.
        """
        self.id, self.model, self._limits, self._sampling, self._greedy = id, model, limits, sampling, greedy
        self._texts, self._records, self._threads = texts, records, threads
        self._generate, self._on_failure, self._counts = generate, on_failure, counts
        self._branches = Branches(texts.encode)
        self._lock = asyncio.Lock()
        # In the order of the requests.
        self._answers: dict[bytes, list[Answer]] = {}
        self._answer_of_key: dict[str, Answer] = {}
        # Recorded turns that this attempt has not used yet, by their request.
        self._recorded: dict[bytes, deque[RecordedTurn]] = {}
        self._next_index = self._turns = 0
        self._is_over = False
        self.limit = ""
        """Code of the last error by a limit of the episode; "" for none."""
        self.refused = 0
        """Requests that got an error with which clients send them again, and that have not come again."""
        # Tokens of each turn that the agent got, by its index.
        self._delivered: dict[int, int] = {}

    async def load(self) -> None:
        """Load the recorded turns. Raises BufferFailed, ServiceUnavailable."""
        self.use_records(await self._on_thread(self._records.load, self.id))

    def use_records(self, record: EpisodeRecord) -> None:
        """Answer requests with the recorded turns, where there is one."""
        for turn in record.turns:
            self._recorded.setdefault(turn.request, deque()).append(turn)
        self._next_index = len(record.turns)

    def answer(self, call: Call, is_retry: bool, key: str | None) -> Answer:
        """Return the answer to a request: an earlier one if the request is repeated. Its task ends when it is complete.

        ``is_retry``: the client says so. ``key``: its Idempotency-Key. Call ``release`` at the end of the connection's interest.
        Raises ProtocolError.
        """
        if self._is_over:
            raise ended()
        found = self._earlier(call, is_retry, key)
        if found is None:
            found = Answer(call.digest, key)
            found.task = asyncio.get_running_loop().create_task(self._complete(found, call))
            # Without a connection that waits for it, no one else takes note of its error.
            found.task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._answers.setdefault(call.digest, []).append(found)
            if key is not None:
                self._answer_of_key[key] = found
        found.waiting += 1
        return found

    def _earlier(self, call: Call, is_retry: bool, key: str | None) -> Answer | None:
        if is_retry and self.refused:
            # It may repeat a request without an answer.
            self.refused -= 1
            is_retry = False
        if key is not None:
            same = self._answer_of_key.get(key)
            if same is not None and same.digest != call.digest:
                raise invalid(
                    "Idempotency-Key: was given with another request; use a new one", code="idempotency_error"
                )
            return same
        earlier = [answer for answer in self._answers.get(call.digest, []) if answer.key is None]
        lost = next((answer for answer in earlier if answer.is_lost), None)
        return lost if lost is not None or not (is_retry and earlier) else earlier[-1]

    def release(self, answer: Answer) -> None:
        """Take note that a connection does not wait for an answer any more. One that has not begun is dropped."""
        answer.waiting -= 1
        if answer.is_lost and not answer.begun and answer.task is not None:
            answer.task.cancel()
            self._forget(answer)

    async def choices(self, answer: Answer, call: Call) -> list[Choice]:
        """Return the choices of a complete answer to ``call``."""
        if answer.choices is None:
            return await self._on_thread(self._choices_again, answer, call)
        return answer.choices

    def header(self, answer: Answer) -> Header:
        """Return the fields of a response that its parts share."""
        first = answer.turns[0].record
        name = hashlib.blake2b(f"{self.id}/{first.index}".encode(), digest_size=12).hexdigest()
        return Header(name, first.created, self.model)

    def set_delivered(self, answer: Answer) -> None:
        """Take note that a connection got an answer."""
        for turn in answer.turns:
            turn.delivered = True
            self._delivered[turn.record.index] = len(turn.token_ids)
        answer.choices = None

    async def deliver(self, answer: Answer) -> None:
        """Take note that a connection gets an answer, before its end is sent."""
        self.set_delivered(answer)

    @property
    def consumed(self) -> tuple[int, int]:
        """Tokens and turns of the answers that the agent got: at most those of the trajectory."""
        return sum(self._delivered.values()), len(self._delivered)

    def refuse(self) -> None:
        """Answer no further requests."""
        self._is_over = True

    async def settled(self) -> None:
        """Wait until no turn is generated or recorded. Call ``refuse`` first."""
        async with self._lock:
            pass

    async def result(self, reward: float | None, generator: str) -> Trajectory | None:
        """Return the trajectory after the end of the agent, once no turn is generated. None if it got no answer.

        ``reward`` is that of the agent, ``generator`` the name of this process in the trajectory.
        """
        self.refuse()
        async with self._lock:
            return await self._on_thread(self._trajectory, reward, generator)

    async def _complete(self, answer: Answer, call: Call) -> None:
        """Generate the answer to a request, or take it from the records."""
        try:
            async with self._lock:
                answer.begun = True
                await self._complete_choices(answer, call)
        except ProtocolError:
            # The same request may be possible later. It has no answer.
            self._forget(answer)
            raise
        except Exception as error:
            self._forget(answer)
            self._on_failure(error)
            raise self._failed() from error

    def _failed(self) -> ProtocolError:
        """Return the answer to a request after a failure that is no fault of its sender."""
        return ProtocolError(503, "The generation has failed and is repeated; end this agent.", "stopped")

    def _over(self) -> ProtocolError:
        """Return the answer to a request after the end of the session."""
        return ended()

    async def _complete_choices(self, answer: Answer, call: Call) -> None:
        prompts = await self._on_thread(self._prompts, call)
        choices = list[Choice]()
        self._check_turns(len(prompts) * call.choices)
        if self._limits.max_branches - len(self._branches) < len(prompts) * call.choices > 1:
            await self._on_thread(self._check_branches, call, prompts)
        for prompt in prompts:
            for _ in range(call.choices):
                if self._is_over:
                    raise self._over()
                turn, choice = await self._turn(call, len(choices), prompt)
                answer.turns.append(turn)
                choices.append(choice)
        answer.choices = choices
        # The agent has gone on after an earlier error.
        self.limit = ""

    async def _turn(self, call: Call, number: int, prompt: str | IntArray) -> tuple[Turn, Choice]:
        """Return choice ``number`` of an answer, which is part of its branch from now on."""
        placement = await self._on_thread(self._place, call, prompt)
        max_tokens = self._max_tokens(placement, call)
        digest = hashlib.blake2b(call.digest, digest_size=16)
        digest.update(number.to_bytes(4) + placement.prompt_ids.tobytes())
        request = digest.digest()
        waiting = self._recorded.get(request)
        if waiting:
            record = waiting.popleft()
            self._counts["recorded"] += 1
        else:
            index = self._next_index
            generated = await self._generate(
                GenerationRequest(self.id, placement.prompt_ids, index, max_tokens, self._greedy)
            )
            record = await self._on_thread(self._record, call, index, request, generated)
            # Not before: an index without a record would hide the records after it.
            self._next_index = index + 1
            self._counts["generated"] += 1
        self._turns += 1
        turn = Turn(record, len(placement.prompt_ids))
        return turn, await self._on_thread(self._add, call, prompt, placement, turn)

    def _forget(self, answer: Answer) -> None:
        earlier = self._answers.get(answer.digest, [])
        if answer in earlier:
            earlier.remove(answer)
        if answer.key is not None:
            self._answer_of_key.pop(answer.key, None)

    def _check_turns(self, count: int) -> None:
        left = self._limits.max_turns - self._turns
        if count > left:
            raise self._limit_error(
                "max_turns",
                f"it asks for {count} of {left} turns that are left (rollout.max_turns {self._limits.max_turns})",
            )

    def _check_new_branches(self, count: int) -> None:
        limit, left = self._limits.max_branches, self._limits.max_branches - len(self._branches)
        if count > left:
            problem = f"it begins {count} conversations, {max(0, left)} are left of the {limit}"
            if count == 1:
                problem = f"its messages continue none of the {limit} conversations"
            raise self._limit_error(
                "max_branches", f"{problem} that {self._whole} may have (environment.agent.max_branches)"
            )

    def _max_tokens(self, placement: Placement, call: Call) -> int:
        """Return the number of tokens that a turn may have. Raises ProtocolError at a limit of the episode."""
        limits = self._limits
        if placement.branch is None:
            self._check_new_branches(1)
        room = min(
            limits.max_response_tokens - placement.response_tokens,
            limits.max_sequence_tokens - len(placement.prompt_ids),
        )
        if room < 1:
            raise self._context_error(
                f"its prompt has {len(placement.prompt_ids)} tokens, {placement.response_tokens} of them after the first "
                f"prompt of its conversation; expected less than {limits.max_sequence_tokens} and "
                f"{limits.max_response_tokens}"
            )
        if limits.max_tokens is not None:
            left = limits.max_tokens - self._branches.generated_tokens
            if left < 1:
                raise self._limit_error(
                    "max_tokens",
                    f"all {limits.max_tokens} tokens of {self._whole} (environment.agent.max_tokens) are used",
                )
            room = min(room, left)
        return min(room, limits.max_turn_tokens or room, call.max_tokens or room)

    def _context_error(self, problem: str) -> ProtocolError:
        settings = "data.max_prompt_tokens and rollout.max_response_tokens"
        return self._limit_error("context_length_exceeded", f"{problem} ({settings})")

    def _limit_error(self, code: str, problem: str) -> ProtocolError:
        self.limit = code
        return invalid(f"This request is above a limit of {self._whole}: {problem}.", code=code)

    # What follows runs on the server's threads.

    def _prompts(self, call: Call) -> Sequence[str | IntArray]:
        if isinstance(call, ChatCall):
            return [self._texts.chat_prompt(call)]
        assert isinstance(call, CompletionCall)
        return [
            prompt if isinstance(prompt, str) else self._texts.checked(np.array(prompt, np.int64), "prompt")
            for prompt in call.prompts
        ]

    def _check_branches(self, call: Call, prompts: Sequence[str | IntArray]) -> None:
        """Refuse a request for several answers before the first one is generated. Each begins a branch, or one continues one."""
        continued = sum(self._place(call, prompt).branch is not None for prompt in prompts)
        if new := len(prompts) * call.choices - continued:
            self._check_new_branches(new)

    def _place(self, call: Call, prompt: str | IntArray) -> Placement:
        if isinstance(prompt, str):
            most = self._limits.max_sequence_tokens * self._texts.longest_token
            if len(prompt) > most:
                # It would take long to encode it.
                raise self._context_error(f"its prompt has {len(prompt)} characters; expected at most {most}")
            return self._branches.place(prompt, isinstance(call, ChatCall))
        return self._branches.place_ids(prompt)

    def _record(self, call: Call, index: int, request: bytes, generated: Trajectory) -> RecordedTurn:
        """Record a generated turn, up to a stop string of its request. Raises FailedPrecondition if another one came first."""
        (segment,) = generated.turns
        spans = generated.version_spans or (
            VersionSpan(generated.policy_version, generated.weights_digest, len(segment.token_ids)),
        )
        end = self._texts.end_of(call, segment.token_ids)
        if end is not None:
            spans = first_tokens(spans, end)
            segment = Segment(segment.role, segment.token_ids[:end], segment.log_probs[:end], spans[-1].policy_version)
        turn = RecordedTurn(
            index,
            segment,
            spans[-1].policy_version,
            spans[-1].weights_digest,
            generated.finish_reason if end is None else FinishReason.EOS,
            spans if len(spans) > 1 else (),
            int(time.time()),
            request,
        )
        if self._records.append(self.id, turn):
            return turn
        # Another process generates this trajectory, too. Its record counts if its agent does the same.
        turns = self._records.load(self.id).turns
        if index < len(turns) and turns[index].request == request:
            return turns[index]
        raise FailedPrecondition(
            f"trajectory {self.id}: another process has recorded another turn {index}; it generates the trajectory, too"
        )

    def _add(self, call: Call, prompt: str | IntArray, placement: Placement, turn: Turn) -> Choice:
        text = prompt if isinstance(prompt, str) else None
        choice = self._texts.choice(self.id, call, text, turn)
        self._branches.add(placement, turn, self._texts.endings(call, text, choice, turn.token_ids))
        return choice

    def _choices_again(self, answer: Answer, call: Call) -> list[Choice]:
        prompts = [prompt for prompt in self._prompts(call) for _ in range(call.choices)]
        return [
            self._texts.choice(self.id, call, prompt if isinstance(prompt, str) else None, turn)
            for prompt, turn in zip(prompts, answer.turns, strict=True)
        ]

    def _trajectory(self, reward: float | None, generator: str) -> Trajectory | None:
        kept = self._branches.finished()
        if not kept:
            return None
        (first, *_), *further = kept
        records = [turn.record for branch, *_ in kept for _, turn in branch.turns]
        # The latest turn has the latest weights, whatever its branch.
        latest = max(records, key=lambda record: record.index)
        spans = merged_spans([span for record in records for span in _spans_of(record)])
        rewards = () if reward is None else (*[0.0] * (len(records) - 1), reward)
        return Trajectory(
            self.id,
            latest.policy_version,
            first.segments,
            FinishReason.LENGTH if self.limit else FinishReason.DONE,
            latest.weights_digest,
            generator,
            spans if len(spans) > 1 else (),
            turn_rewards=rewards,
            further_branches=tuple(Branch(branch.segments, parent, shared) for branch, parent, shared in further),
        )

    async def _on_thread(self, work: Callable[..., Result], *arguments: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)


def _spans_of(record: RecordedTurn) -> tuple[VersionSpan, ...]:
    """Return the weights of all tokens of a turn."""
    whole = VersionSpan(record.policy_version, record.weights_digest, len(record.segment.token_ids))
    return record.version_spans or (whole,)
