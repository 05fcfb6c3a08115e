"""LLM: the offline front door. Chat protocol and engine in the caller's process.

In: text, ids or conversations. Out: Completions, in the order of the prompts.
Invariants: ids, logprobs and top logprobs of a Completion have equal length and leave out what ended it (a stop id, a
stop string); a failed completion says so and costs no other; whoever stops waiting (Ctrl-C) leaves a clean engine.
Not thread-safe. The same model behind HTTP is `baltoro serve`.

    llm = LLM("models/mini")
    llm.generate(["The sun"], SamplingParams(max_tokens=20))[0].text

Prefixes are kept from call to call. `with LLM(...) as llm`, `llm.close()` or the end of the program finish what the
disk tier is still writing.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from baltoro.chat.events import Parsed
from baltoro.chat.factories import Factories
from baltoro.chat.grammar import chat_grammar
from baltoro.chat.media import PictureConfig, expand_pads, preprocess
from baltoro.chat.parser import parse
from baltoro.chat.stop import cut_at_stop
from baltoro.chat.tokenizer import MEDIA_PAD, Tokenizer
from baltoro.chat.xtml import render
from baltoro.errors import ConfigError, QueueFull, RequestError
from baltoro.llm.jobs import ChatFacts, Job, Part
from baltoro.llm.progress import no_bar, progress_bar
from baltoro.protocol.completion import Completion, TokenDelta
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import MediaItem, Submit

if TYPE_CHECKING:
    from baltoro.engine.engine import Engine

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]
OnTokens = Callable[[TokenDelta], None]


class LLM:
    """One model, loaded. `options` are the fields of `EngineConfig`, such as memory_bytes, dtype, max_running."""

    def __init__(self, model: str | Path, **options: Any) -> None:
        """Load the model and the tokenizer of a folder. Sets the number of torch's threads in this process
        (`engine/threads.py`). Errors: ConfigError, WeightsError."""
        from baltoro.config import build
        from baltoro.engine.config import EngineConfig
        from baltoro.engine.engine import load_engine
        from baltoro.engine.threads import set_threads

        set_threads(model)
        self.tokenizer = Tokenizer.load(model)
        made = Factories(self.tokenizer)
        self.engine: Engine = load_engine(
            model,
            build(EngineConfig, options),
            eos_ids=made.eos_ids,
            stop_rules=made.stop_rule,
            masks=made.mask,
        )
        self._numbers = itertools.count()
        # also when this object is dropped, and at the end of the program
        self._close = weakref.finalize(self, self.engine.close)
        num_ids, vocab = self.tokenizer.vocab_size, self.engine.model_config.vocab_size
        if num_ids < vocab:
            raise ConfigError(
                f"{model}: the model has {vocab} ids, its tokenizer only {num_ids}; they do not belong together"
            )

    def close(self) -> None:
        """Finish what the disk tier is writing and let go of its folder. Nothing can be generated afterwards; harmless
        the second time."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- front doors ---------------------------------------------------------------------------------------------
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        adapter: str | None = None,
        progress: bool = False,
        on_tokens: OnTokens | None = None,
    ) -> list[Completion]:
        """Complete each prompt (text, in which control tokens are plain text, or ids) n times.

        `params`: one for all, or one a prompt. `adapter`: a loaded one. `progress` shows a bar on stderr. `on_tokens`
        sees every delta as it comes. Errors: RequestError, ContextLengthError before anything runs.
        """
        texts = _as_list(prompts)
        ids = [self.tokenizer.encode(p) if isinstance(p, str) else list(p) for p in texts]
        jobs = [
            Job(self._submit(tokens, one, n=n, adapter=adapter))
            for tokens, one in zip(ids, _params(params, len(ids)), strict=True)
        ]
        return self._run(jobs, progress=progress, on_tokens=on_tokens)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[dict[str, Any]] = (),
        thinking: bool = True,
        effort: str | None = None,
        tool_choice: str | dict[str, Any] | None = None,
        response_format: dict[str, Any] | None = None,
        n: int = 1,
        adapter: str | None = None,
        progress: bool = False,
        on_tokens: OnTokens | None = None,
    ) -> list[Completion]:
        """Answer each conversation n times. The Completion's `text` is the answer; `reasoning` and `tool_calls` are
        taken apart from it. Errors: RequestError names the message or option at fault."""
        talks: Sequence[Any] = [messages] if not messages or isinstance(messages[0], Mapping) else messages
        jobs = []
        for talk, one in zip(talks, _params(params, len(talks)), strict=True):
            prompt = render(
                talk,
                tokenizer=self.tokenizer,
                tools=list(tools) or None,
                thinking=thinking,
                effort=effort,
                tool_choice=tool_choice,
                response_format=response_format,
            )
            ids, media = self._with_pictures(prompt.ids, prompt.images)
            grammar = chat_grammar(
                self.tokenizer,
                thinking=thinking,
                response_format=response_format,
                tools=tools,
                tool_choice=tool_choice,
            )
            submit = self._submit(ids, one, n=n, adapter=adapter, media=media, grammar=grammar)
            past = sum(len(message.get("tool_calls") or ()) for message in talk)
            jobs.append(Job(submit, ChatFacts(thinking, bool(tools) and tool_choice != "none", past)))
        return self._run(jobs, progress=progress, on_tokens=on_tokens)

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load the adapter of a folder (`max_loras` of at least 1), or a new version of it; `generate` and `chat` take
        its name. Errors: ConfigError, WeightsError, RequestError."""
        self.engine.load_adapter(name, path)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter. Errors: RequestError if it is not loaded."""
        self.engine.unload_adapter(name)

    # ---- requests ------------------------------------------------------------------------------------------------
    def _submit(self, ids: Sequence[int], params: SamplingParams, **fields: Any) -> Submit:
        return Submit(request_id=f"offline-{next(self._numbers)}", token_ids=tuple(ids), params=params, **fields)

    def _with_pictures(self, ids: list[int], images: Sequence[Any]) -> tuple[list[int], tuple[MediaItem, ...]]:
        """Ids with one pad for each feature, and the pictures as the engine takes them."""
        vision = self.engine.model_config.vision
        if not images:
            return ids, ()
        if vision is None:
            raise RequestError("this model reads no pictures: send text", param="messages")
        config = PictureConfig(patch_size=vision.patch_size, merge=vision.merge)
        pictures = [preprocess(image, config) for image in images]
        items = tuple(MediaItem(p.pixels.tobytes(), p.grid, vision.patch_size) for p in pictures)
        return expand_pads(ids, self.tokenizer.special(MEDIA_PAD), [p.num_tokens for p in pictures]), items

    # ---- work ----------------------------------------------------------------------------------------------------
    def _run(self, jobs: list[Job], *, progress: bool, on_tokens: OnTokens | None) -> list[Completion]:
        """Feed and step the engine until every job has ended."""
        for job in jobs:
            self.engine.check(job.submit)
        by_id = {job.submit.request_id: job for job in jobs}
        total = sum(job.submit.n for job in jobs)
        waiting, num_left = list(reversed(jobs)), total
        try:
            with progress_bar(total) if progress else nullcontext(no_bar) as advance:
                while num_left:
                    self._feed(waiting)
                    for delta in self.engine.step():
                        by_id[delta.request_id].parts[delta.index].add(delta)
                        num_left -= delta.finish_reason is not None
                        advance(len(delta.token_ids), delta.finish_reason is not None)
                        if on_tokens is not None:
                            on_tokens(delta)
        finally:
            for job in jobs:
                self.engine.abort(job.submit.request_id)
            while self.engine.has_work:
                self.engine.step()
        return [self._completion(job, part) for job in jobs for part in job.parts]

    def _feed(self, waiting: list[Job]) -> None:
        """Hand over as many jobs as the engine's line takes; the rest later."""
        while waiting:
            try:
                self.engine.add(waiting[-1].submit)
            except QueueFull:
                if not self.engine.has_work:
                    raise
                return
            waiting.pop()

    def _completion(self, job: Job, part: Part) -> Completion:
        """The words of a finished part."""
        last, first, submit = part.deltas[-1], job.parts[0].deltas[0], job.submit
        assert last.finish_reason is not None
        kept = len(part.ids) - last.num_trimmed
        ids = part.ids[:kept]
        parsed = self._parsed(part, job.chat, kept, submit.params.stop)
        return Completion(
            request_id=submit.request_id,
            prompt_token_ids=submit.token_ids,
            token_ids=tuple(ids),
            text=parsed.content,
            finish_reason=last.finish_reason,
            logprobs=None if submit.params.logprobs is None else tuple(part.logprobs[:kept]),
            top_logprobs=tuple(part.tops[:kept]) if submit.params.logprobs else None,
            prompt_logprobs=first.prompt_logprobs,
            prompt_top_logprobs=first.prompt_top_logprobs,
            num_cached_tokens=last.num_cached_tokens,
            policy_version=last.version,
            reasoning=parsed.reasoning,
            tool_calls=tuple({"id": c.id, "name": c.name, "arguments": c.arguments} for c in parsed.tool_calls),
            error=last.error,
        )

    def _parsed(self, part: Part, chat: ChatFacts | None, kept: int, stops: Sequence[str]) -> Parsed:
        """The text of the first `kept` ids, and of what stands before a stop string in the id that follows."""
        last = part.deltas[-1]
        is_string = last.finish_reason == "stop" and last.stop_reason is None
        ids = part.ids if is_string else part.ids[:kept]
        if chat is None:
            parsed = Parsed(None, self.tokenizer.decode(ids, skip_special=True))
        else:
            parsed = parse(
                ids,
                self.tokenizer,
                thinking=chat.is_thinking,
                has_tools=chat.has_tools,
                start_index=chat.num_past_calls,
            )
        if not is_string:
            return parsed
        reasoning = None if parsed.reasoning is None else cut_at_stop(parsed.reasoning, stops)
        return Parsed(reasoning, cut_at_stop(parsed.content, stops), parsed.tool_calls)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many -> many."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} params for {count} prompts: give one, or one for each", param="params")
    return list(params)
