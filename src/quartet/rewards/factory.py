"""Creation of the reward source that a config describes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import structlog

from quartet.config.rewards import RewardSourceConfig
from quartet.config.root import Config
from quartet.contract.status import ServiceStatus
from quartet.errors import MismatchError, QuartetError, ServiceUnavailable
from quartet.models.weights.tokenizer import load_tokenizer, tokenizer_fingerprint
from quartet.models.workers.workers import SINGLE, Workers
from quartet.rewards.ensemble import EnsemblePart, EnsembleReward
from quartet.rewards.function import FunctionReward
from quartet.rewards.http_scorer import HttpScorer
from quartet.rewards.judge import Judge
from quartet.rewards.model import ModelReward
from quartet.rewards.remote import RemoteReward, Scorer
from quartet.rewards.response_texts import ResponseTexts
from quartet.rewards.reward_source import RewardSource
from quartet.rewards.service_scorer import ServiceScorer
from quartet.rewards.triton_scorer import TritonScorer
from quartet.rpc.security.credentials import LOCAL, Credentials

log = structlog.get_logger()


def build_reward(
    config: Config, device: str, workers: Workers = SINGLE, credentials: Credentials = LOCAL
) -> RewardSource:
    """Load models on ``device``, start the processes of functions, and connect to scorers. The caller must close the source.

    The ``workers`` hold the models together. ``credentials`` are those of this process. A RewardService that is a part of an
    ensemble may be unreachable, because the weights of a request say whether it is needed. Raises ModelError; ConfigError if a
    function cannot be imported or a file cannot be used; MismatchError if sources have different vocabularies. After an error
    nothing is left running.
    """
    build = _Builder(config, device, workers, credentials)
    if config.reward.source != "ensemble":
        return build("reward", config.reward)
    with ExitStack() as built:
        parts = []
        for part in config.reward.parts:
            source = build(f"reward.parts.{part.name}", part, part.weight)
            built.callback(source.close)
            parts.append(EnsemblePart(part.name, part.weight, source, part.optional))
        _check_tokenizers(config, parts)
        ensemble = EnsembleReward(parts, config.reward.shadow_timeout_seconds)
        built.pop_all()
        return ensemble


class _Builder:
    """Builder of single sources."""

    def __init__(self, config: Config, device: str, workers: Workers, credentials: Credentials) -> None:
        self._config, self._device, self._workers, self._credentials = config, device, workers, credentials

    def __call__(self, key: str, source: RewardSourceConfig, weight: float | None = None) -> RewardSource:
        """Build one source. ``key`` is its config key, ``weight`` that of a part of an ensemble."""
        tokenizer = self._config.reward_tokenizer
        if source.source == "model":
            return ModelReward(source, self._device, self._workers)
        if source.source == "function":
            shared = self._config.services.reward.sharing is not None
            max_steps = None if shared else self._config.run.steps
            return FunctionReward(source, tokenizer, key, max_steps, self._config.has_environment)
        return self._remote(key, source, ResponseTexts(tokenizer), weight)

    def _remote(self, key: str, source: RewardSourceConfig, texts: ResponseTexts, weight: float | None) -> RewardSource:
        http, triton, service, judge = source.http, source.triton, source.service, source.judge
        create: Callable[[], Scorer]
        if service is not None:
            scorer = ServiceScorer(service, f"{key}.service", self._credentials)
            status = _service_status(scorer, f"{key}.service", texts.status(service.address), weight)
            return RemoteReward(lambda: scorer, f"{key}.service", texts, status)
        if http is not None:
            name, create = f"{http.dialect} at {', '.join(http.urls)}", lambda: HttpScorer(http, f"{key}.http")
        elif triton is not None:
            name, create = f"{triton.model} at {triton.url}", lambda: TritonScorer(triton, f"{key}.triton")
        else:
            assert judge is not None
            name = f"{judge.model} at {judge.url}"
            # One file for each source, so that the limit holds for each.
            file = self._config.run_directory / f"{key}.judge.sqlite3"
            create = lambda: Judge(judge, f"{key}.judge", file)  # noqa: E731
        return RemoteReward(create, f"{key}.{source.source}", texts, texts.status(name))


def _service_status(scorer: ServiceScorer, key: str, expected: ServiceStatus, weight: float | None) -> ServiceStatus:
    """Return the status of a RewardService. One that cannot be reached, and may not be needed, is checked at its first call.

    ``expected`` is its status then.
    """
    try:
        return scorer.wait_until_ready() if weight != 0 else scorer.status_now()
    except QuartetError as error:
        if weight is None or (weight and not isinstance(error, ServiceUnavailable)):
            raise
        log.warning("reward source not reached", source=key, error=str(error))
        scorer.check_later(expected)
        return expected


def _check_tokenizers(config: Config, parts: list[EnsemblePart]) -> None:
    expected = tokenizer_fingerprint(load_tokenizer(config.reward_tokenizer))
    for part in parts:
        status = part.source.status()
        if status.tokenizer_fingerprint != expected:
            raise MismatchError(
                f"reward.parts.{part.name}.model {status.model}: its vocabulary is not that of {config.reward_tokenizer} "
                "(reward.tokenizer, or actor.model if that is null), so token ids would be misread; use models "
                "trained with one tokenizer and set it as reward.tokenizer"
            )
