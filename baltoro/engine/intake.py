"""Submit -> Requests: whether it can be served at all, and everything about its completions that is settled once.

In: Submits, of clients that may be wrong. Out: `n` Requests each, or the client's error.
Invariants: what `check` lets pass can be served, sooner or later; seeds depend on the engine's seed and the order of
arrival only, or on what the client asked for; stop rules and masks are one object per completion.
Single writer: the engine's thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection

import msgspec

from baltoro.engine.adapters import AdapterBook
from baltoro.engine.config import EngineConfig
from baltoro.engine.media import media_runs
from baltoro.engine.prefix_key import namespace_of
from baltoro.engine.request import MediaRun, Request
from baltoro.engine.roster import Roster
from baltoro.engine.sampler import fork_seed, uniform
from baltoro.errors import ContextLengthError, RequestError
from baltoro.model.config import K3Config
from baltoro.protocol.sampling import SamplingParams, StopRule, TokenMask
from baltoro.protocol.worker import Submit

StopRules = Callable[[SamplingParams], StopRule | None]
Masks = Callable[[Submit], TokenMask | None]

MAX_COMPLETIONS = 128
"""Of one request: `n`."""


class Intake:
    """Makes requests. Single writer: the engine."""

    def __init__(
        self,
        config: EngineConfig,
        model: K3Config,
        roster: Roster,
        adapters: AdapterBook,
        max_context: int,
        *,
        eos_ids: Collection[int] | None = None,
        stop_rules: StopRules | None = None,
        masks: Masks | None = None,
    ) -> None:
        """`eos_ids`: default the model config's. `max_context`: tokens of prompt and answer together."""
        self._config, self._model, self._max_context = config, model, max_context
        self._roster, self._adapters = roster, adapters
        self._eos_ids = frozenset(eos_ids if eos_ids is not None else (model.eos_token_id,))
        self._stop_rules, self._masks = stop_rules, masks
        self._arrivals = 0

    def requests(self, submit: Submit, policy_version: int) -> list[Request]:
        """The completions of `submit`. Errors: as `check`."""
        runs = self.check(submit)
        adapter = None if submit.adapter is None else self._adapters.select(submit.adapter)
        prefix = None if adapter is None else adapter.namespace
        self._arrivals += 1
        params = submit.params
        seed = params.seed
        if seed is None:
            seed = int(uniform(self._config.seed, self._arrivals) * 2**53)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids)
        max_tokens = min(params.max_tokens, self._max_context - len(submit.token_ids))
        prompt_ids = frozenset(submit.token_ids if params.repetition_penalty != 1.0 else ())
        return [
            Request(
                request_id=submit.request_id,
                index=index,
                arrival=self._arrivals,
                priority=submit.priority,
                # the first completion tells the prompt's logprobs for all
                params=params if index == 0 else msgspec.structs.replace(params, prompt_logprobs=None),
                seed=fork_seed(seed, index),
                tokens=array("q", submit.token_ids),
                adapter=adapter,
                namespace=namespace_of(prefix, submit.cache_salt, policy_version),
                cache_salt=submit.cache_salt,
                num_prompt=len(submit.token_ids),
                max_tokens=max_tokens,
                prompt_ids=prompt_ids,
                stop_ids=stop_ids,
                stop_rule=self._stop_rules(params) if self._stop_rules is not None else None,
                mask=self._masks(submit) if self._masks is not None else None,
                media=runs,
                wants_routes=submit.return_routed_experts,
            )
            for index in range(submit.n)
        ]

    def check(self, submit: Submit) -> tuple[MediaRun, ...]:
        """Whether a request can be served at all; where its pictures go. Errors: RequestError, ContextLengthError."""
        vocab, ids, params = self._model.vocab_size, submit.token_ids, submit.params
        if not ids:
            raise RequestError("the prompt is empty: it needs at least one token", param="prompt")
        if min(ids) < 0 or max(ids) >= vocab:
            raise RequestError(f"the prompt has an id outside 0..{vocab - 1}", param="prompt")
        if not 1 <= submit.n <= MAX_COMPLETIONS:
            raise RequestError(f"n must lie between 1 and {MAX_COMPLETIONS}", param="n")
        if any(not 0 <= token < vocab for token in params.logit_bias):
            raise RequestError(f"logit_bias names an id outside 0..{vocab - 1}", param="logit_bias")
        if any(not 0 <= token < vocab for token in params.stop_token_ids):
            raise RequestError(f"stop_token_ids has an id outside 0..{vocab - 1}", param="stop_token_ids")
        if submit.return_routed_experts and not self._config.keeps_routed_experts:
            raise RequestError(
                "this engine does not keep which experts its routers took: start it with keeps_routed_experts",
                param="return_routed_experts",
            )
        if submit.adapter is not None:
            self._adapters.select(submit.adapter)
        if self._roster.is_alive(submit.request_id):
            raise RequestError(f"request id {submit.request_id!r} is in use", param="request_id")
        if len(ids) >= self._max_context:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens; prompt and answer may have {self._max_context} together",
                param="messages",
                code="context_length_exceeded",
            )
        return media_runs(submit.token_ids, submit.media, self._model)
