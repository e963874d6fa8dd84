"""From a checked body and its prompts to a Job."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from sapwood_server.api.auth import salt
from sapwood_server.api.job import Job, new_id
from sapwood_server.api.length import LengthRules, RequestFields
from sapwood_server.api.sampling import integer, token_ids
from sapwood_server.api.service import Service
from sapwood_server.api.wire_shared import SharedBody
from sapwood_server.errors import BadRequestError, NotFoundError
from sapwood_server.quoting import quote, quote_json
from sapwood_server.values.messages import EngineInfo
from sapwood_server.values.request import Request
from sapwood_server.values.sampling import SamplingParams

_MAX_PRIORITY = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class JobBuilder:
    """Builds the jobs of one route for one tenant."""

    service: Service
    info: EngineInfo
    tenant: str
    id_prefix: str
    prompt_field: str
    """The field that errors about the prompt name."""

    def build(
        self, body: SharedBody, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams, ignored: tuple[str, ...]
    ) -> Job:
        """The job. Raises BadRequestError if a prompt does not fit or `forced_tokens` are not as they must be."""
        job_id = new_id(self.id_prefix)
        return Job(
            id=job_id,
            created=int(time.time()),
            model=body.model,
            system_fingerprint=f"fp_{self.info.fingerprint[:12]}",
            requests=self._requests(job_id, body, prompts, sampling),
            ignored=ignored,
            stream=bool(body.stream),
            include_usage=body.include_usage,
            return_token_ids=bool(body.return_token_ids),
        )

    def _requests(
        self, job_id: str, body: SharedBody, prompts: Sequence[tuple[int, ...]], sampling: SamplingParams
    ) -> tuple[Request, ...]:
        lengths = LengthRules.of(self.info, strict=self.service.strict_max_tokens)
        fields = RequestFields(prompt=self.prompt_field, length=body.length_field)
        budgets = [lengths.budget(len(ids), sampling.max_tokens, fields) for ids in prompts]
        priority = integer("priority", body.priority, 0, -_MAX_PRIORITY, _MAX_PRIORITY)
        forced = self._forced_tokens(body, len(prompts) * sampling.n)
        return tuple(
            Request(
                request_id=f"{job_id}-{index}",
                prompt_token_ids=ids,
                sampling=msgspec.structs.replace(sampling, max_tokens=budget),
                salt=salt(self.tenant, body.cache_salt),
                priority=priority,
                forced_tokens=forced[index * sampling.n : (index + 1) * sampling.n],
            )
            for index, (ids, budget) in enumerate(zip(prompts, budgets, strict=True))
        )

    def _forced_tokens(self, body: SharedBody, num_choices: int) -> tuple[tuple[int, ...], ...]:
        """One entry per choice, or none. A single choice's entry may stand alone."""
        forced = body.forced_tokens
        if forced is None:
            return ()
        if not self.service.enable_test_hooks:
            raise BadRequestError(
                "forced_tokens is a test hook; it is only accepted by a server started with --enable-test-hooks",
                code="unsupported_parameter",
                param="forced_tokens",
            )
        entries = _forced_entries(forced)
        if entries is None or len(entries) != num_choices:
            raise BadRequestError(
                f"forced_tokens is {quote_json(forced)}; accepted: {num_choices} entries, one per choice, each a text "
                "or a list of token ids (a single one may stand alone)",
                param="forced_tokens",
            )
        return tuple(self._forced_ids(entry) for entry in entries)

    def _forced_ids(self, entry: str | list[int]) -> tuple[int, ...]:
        if isinstance(entry, str):
            return self.service.prompts.encode_answer(entry)
        return token_ids("forced_tokens", entry, self.info.vocab_size)


def _forced_entries(forced: str | list[int | str | list[int]]) -> list[str | list[int]] | None:
    """One entry per choice; None if ids and entries are mixed."""
    if isinstance(forced, str):
        return [forced]
    ids = [item for item in forced if isinstance(item, int)]
    if len(ids) == len(forced):
        return [ids]
    return None if ids else [item for item in forced if not isinstance(item, int)]


def check_model(service: Service, name: str) -> None:
    """Raises NotFoundError unless the model is served under this name."""
    if name not in service.model_names:
        served = ", ".join(quote(known) for known in service.model_names)
        raise NotFoundError(
            f"the model {quote(name)} does not exist; this server has {served}", code="model_not_found", param="model"
        )
