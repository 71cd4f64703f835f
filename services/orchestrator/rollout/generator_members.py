"""The generators that a pool knows: which respond, which fit the run, which join and leave."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from quartet.config.root import Config
from quartet.contract.generation import EngineProperties, GenerationRequest
from quartet.contract.status import GeneratorInfo, GeneratorState, ProcessStatus, ServiceStatus
from quartet.contract.weights import WeightTransfer
from quartet.errors import MismatchError, QuartetError, ServiceUnavailable
from quartet.preflight.generator_check import generator_mismatch
from quartet.rpc.clients import ActorClient, GenerationClient
from quartet.rpc.pending_calls import PendingResult
from quartet.rpc.security.credentials import LOCAL, Credentials
from quartet.rpc.service_channel import endpoints_at
from quartet.services.orchestrator.rollout.generation import RepeatabilityNotes
from quartet.services.orchestrator.rollout.generator_work import Work

log = structlog.get_logger()

CHECK_SECONDS = 0.5
"""Interval at which generators that do not respond are asked again."""
RESOLVE_SECONDS = 10.0
"""Interval at which host names are resolved again, for generators that have joined."""

SETTLE_SECONDS = 3.0
"""Time that all generators get to respond once one is ready, so that the first step is split over all of them."""


@dataclass(eq=False, slots=True)
class Member:
    """One generator. ``status`` is None while it does not respond. ``digest`` names the weights that it is known to hold."""

    client: GenerationClient
    status: ServiceStatus | None = None
    digest: bytes = b""
    transfer: WeightTransfer | None = None
    """Its last transfer of weights."""
    instance_id: str = ""
    """Id of the process that gave the status."""
    refused: str = ""
    """Reason why this process gets no work."""
    left: bool = False
    """Set if its address no longer belongs to a generator. It gets no work, and is forgotten when its call has ended."""
    failures: int = 0
    """Failed calls since its last generation."""
    changes: int = 0
    """Calls of this process at whose end its weights had changed."""
    exhausted: bool = False
    """True if it is refused because of its failures, which may have another cause."""
    last_error: str = ""
    question: PendingResult[tuple[ProcessStatus, ServiceStatus]] | None = None
    """The last request for its status."""
    call: PendingResult[Any] | None = None
    update: PendingResult[WeightTransfer] | None = None
    """An in-flight update. No other call begins until it has ended."""
    work: Work | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    attempt: int = 0
    """Number of its Generate call, 0 without one."""

    @property
    def address(self) -> str:
        return self.client.channel.address

    @property
    def ready(self) -> bool:
        return self.status is not None and not self.refused and not self.left

    @property
    def awaited(self) -> bool:
        """Return whether its first status, or an error, is still to come."""
        return self.status is None and not self.last_error and not self.refused and not self.left

    def info(self) -> GeneratorInfo:
        state = GeneratorState.READY if self.ready else GeneratorState.REFUSED if self.refused else GeneratorState.LOST
        seen = self.work.seen if self.work is not None else set()
        return GeneratorInfo(self.address, state, self.refused, sum(each.id not in seen for each in self.requests))


class Members:
    """The generators of ``services.generators`` by address.

    ``lock`` guards all members. Its holder may change them. One thread resolves host names, and another asks the generators that
    do not respond, all at once. Their answers arrive in callbacks.
    """

    def __init__(
        self,
        config: Config,
        actor: ActorClient,
        note: Callable[[str], None],
        on_joined: Callable[[], None],
        credentials: Credentials = LOCAL,
    ) -> None:
        """``note`` shows a line to the user. ``on_joined`` is called without the lock when a generator has joined."""
        self._config, self._actor, self._credentials = config, actor, credentials
        self._note, self._on_joined = note, on_joined
        self._repeatability = RepeatabilityNotes(config, note)
        self.lock = threading.RLock()
        self.by_address: dict[str, Member] = {}
        self._changed = threading.Condition(self.lock)
        self._closed = threading.Event()
        self._vocabulary_size: int | None = None
        self._monitored = False

    def all(self) -> list[Member]:
        """Return all members. The caller holds the lock."""
        return [*self.by_address.values()]

    def ready(self) -> list[Member]:
        """Return the members that may get work. The caller holds the lock."""
        return [member for member in self.by_address.values() if member.ready]

    def wait_until_ready(self, timeout: float, check_alive: Callable[[], None] = lambda: None) -> None:
        """Wait until a generator is ready, and until the others have responded or SETTLE_SECONDS are over.

        ``check_alive`` may raise to end the wait. Raises ServiceUnavailable.

        Failures until now no longer count: they may be due to a service that has been restarted.
        """
        self._vocabulary_size = self._actor.status().vocabulary_size
        with self.lock:
            for member in self.all():
                member.failures = 0
                if member.exhausted:
                    member.refused, member.exhausted = "", False
            if not self._monitored:
                self._monitored = True
                for work, seconds in ((self._resolve, RESOLVE_SECONDS), (self._ask_absent, CHECK_SECONDS)):
                    threading.Thread(
                        target=self._repeat, args=(work, seconds), name=work.__name__.strip("_"), daemon=True
                    ).start()
        waited = 0.0
        with self._changed:
            while not self.ready() or (waited < SETTLE_SECONDS and any(member.awaited for member in self.all())):
                refusals = [f"{member.address}: {member.refused}" for member in self.all() if member.refused]
                if waited >= timeout or (refusals and len(refusals) == len(self.by_address)):
                    reason = f": {'; '.join(refusals)}" if refusals else f" within {timeout:g} s"
                    raise ServiceUnavailable(
                        f"generators {', '.join(self._config.services.generators)}: none is ready{reason}; start one, or "
                        "correct services.generators"
                    )
                self._changed.wait(0.1)
                waited += 0.1
                check_alive()

    def refuse(self, member: Member, reason: str, exhausted: bool = False) -> None:
        """Give a generator no more work until it has been restarted. The caller holds the lock.

        ``exhausted``: because of its failures, which count until the next ``wait_until_ready``.
        """
        if not member.refused:
            log.warning("generator refused", address=member.address, reason=reason)
            self._note(f"generator {member.address} gets no more work: {reason}")
        member.refused, member.exhausted, member.digest = reason, exhausted, b""

    def statuses(self) -> dict[str, ServiceStatus]:
        """Return the last known status of each generator that responds, by address."""
        with self.lock:
            return {address: member.status for address, member in self.by_address.items() if member.status is not None}

    def engines(self) -> list[EngineProperties]:
        """Return what the engines of the generators declare, each declaration once."""
        engines = (status.engine for _, status in sorted(self.statuses().items()))
        return list(dict.fromkeys(engine for engine in engines if engine is not None))

    def close(self) -> None:
        """End the monitor and the connections."""
        self._closed.set()
        with self.lock:
            members = self.all()
            self.by_address.clear()
        # Without the lock: closing a channel waits for the callbacks of its calls, which take the lock.
        for member in members:
            member.client.close()

    def _repeat(self, work: Callable[[], None], seconds: float) -> None:
        """Call ``work`` at an interval until the members are closed, even if it fails."""
        while not self._closed.is_set():
            try:
                work()
            except Exception:
                log.exception("monitor of the generators failed; it continues", work=work.__name__)
            self._closed.wait(seconds)

    def _ask_absent(self) -> None:
        """Ask all generators that do not respond for their status."""
        with self.lock:
            absent = [member for member in self.all() if not member.left and (member.status is None or member.refused)]
        for member in absent:
            self._ask(member)

    def _resolve(self) -> None:
        resolved = [endpoints_at(address) for address in self._config.services.generators]
        addresses = {address for each in resolved for address in each}
        forgotten: list[Member] = []
        with self.lock:
            if all(resolved):
                for member in self.all():
                    # A replica that has ended, or a name that now has several addresses.
                    member.left = member.address not in addresses
                    if member.left and member.call is None:
                        del self.by_address[member.address]
                        forgotten.append(member)
            for address in sorted(addresses):
                if address not in self.by_address and not self._closed.is_set():
                    client = GenerationClient(address, self._config.timeouts, self._credentials)
                    client.channel.tracer = self._actor.channel.tracer
                    self.by_address[address] = Member(client)
                    self._ask(self.by_address[address])
        # Without the lock, as in ``close``.
        for member in forgotten:
            member.client.close()

    def _ask(self, member: Member) -> None:
        """Ask a generator for its status, unless an earlier question is not answered yet."""
        with self.lock:
            if self._closed.is_set() or (member.question is not None and not member.question.done()):
                return
            try:
                question = member.question = member.client.start_status()
            except QuartetError:
                return  # It has left meanwhile.
        question.when_done(lambda: self._answered(member, question))

    def _answered(self, member: Member, question: PendingResult[tuple[ProcessStatus, ServiceStatus]]) -> None:
        try:
            process, status = question.result()
        except MismatchError as error:
            with self._changed:
                if not member.refused:
                    member.refused, member.instance_id = str(error), ""
                self._changed.notify_all()
        except QuartetError as error:
            with self.lock:
                member.last_error = str(error)
        except Exception:
            log.exception("status of a generator cannot be read", address=member.address)
        else:
            if self._joined(member, process, status):
                self._on_joined()

    def _joined(self, member: Member, process: ProcessStatus, status: ServiceStatus) -> bool:
        """Take note of the status of a generator. Return whether it has joined.

        A refused process stays refused. Another process at its address may join.
        """
        with self._changed:
            if member.left:
                return False
            if member.status is not None and not member.refused:
                if process.instance_id == member.instance_id:
                    member.status = status
                    self._give_notes()
                return False
            if member.refused:
                if process.instance_id == member.instance_id:
                    return False
                member.refused, member.exhausted, member.failures = "", False, 0
            if process.instance_id != member.instance_id:
                member.changes = 0
            transfer = status.last_transfer
            member.status, member.instance_id = status, process.instance_id
            member.digest, member.transfer = transfer.weights_digest if transfer else b"", transfer
            member.refused = generator_mismatch(self._config, process, status, self._vocabulary_size)
            log.info("generator joined", address=member.address, refused=member.refused)
            if member.refused:
                self._note(f"generator {member.address} gets no work: {member.refused}")
            self._give_notes()
            self._changed.notify_all()
            return True

    def transferred(self, member: Member, transfer: WeightTransfer) -> None:
        """Take note of a transfer. After the first one of a process, ask for its status again: an engine that calls a server
        knows the server's guarantees only then. The caller holds the lock.
        """
        first, member.transfer = member.transfer is None, transfer
        if first:
            self._ask(member)

    def _give_notes(self) -> None:
        """Warn of engines on which the bits of the run depend. The caller holds the lock."""
        declared = [(member.status.engine, member.transfer) for member in self.ready() if member.status is not None]
        # Without a trial, an engine declares its guarantees once it has weights.
        engines = [engine for engine, transfer in declared if engine is not None and (engine.trial or transfer)]
        self._repeatability.give(engines)
