"""From a chat body to what the engine is asked: options, prompt, pictures, limits, grammar.

In: a parsed `ChatRequest`. Out: a frozen `ChatPlan` with the Submit and what the way back has to know.
Invariants: pure, and may run in a thread; nothing is submitted here; every error names the client's field.
The prompt's tokens, as usage counts them, leave out the opening of the first channel: it is the answer's, as on
Moonshot's own service ("hi" is 19 tokens there, 22 are read by the model).
Source: spec of K3's chat protocol; Moonshot's `thinking` object: it wins over `reasoning_effort`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs
from PIL import Image

from baltoro.chat.grammar import chat_grammar
from baltoro.chat.media import PictureConfig, expand_pads, preprocess
from baltoro.chat.messages import ChatOptions, chat_options
from baltoro.chat.tokenizer import MEDIA_PAD, OPEN, Tokenizer
from baltoro.chat.xtml import render
from baltoro.errors import RequestError
from baltoro.protocol.openai import ChatRequest, Message, NamedToolChoice, ResponseFormat
from baltoro.protocol.worker import MediaItem, Submit
from baltoro.server.config import ServerConfig
from baltoro.server.sampling import new_id, num_choices, output_room, sampling_params

MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """One chat request, ready to go. `num_hidden` prompt tokens are not told in usage."""

    id: str
    submit: Submit
    is_thinking: bool
    has_tools: bool
    has_logprobs: bool
    num_past_calls: int
    num_hidden: int

    def with_adapter(self, adapter: str | None) -> ChatPlan:
        """The same for an adapter, None for the base."""
        return replace(self, submit=structs.replace(self.submit, adapter=adapter))


def plan_chat(body: ChatRequest, config: ServerConfig, tokenizer: Tokenizer) -> ChatPlan:
    """Render and check everything. Errors: RequestError, ContextLengthError."""
    options = thinking_options(body, config)
    n = num_choices(body, config)
    logprobs = _num_logprobs(body)
    tools = _tools(body)
    choice = _tool_choice(body, tools)
    ids, media, num_hidden = _prompt(body, options, choice, config, tokenizer)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    max_tokens = output_room(len(ids), asked, config, prompt_field="messages")
    params = sampling_params(body, config, vocab_size=tokenizer.vocab_size, max_tokens=max_tokens, logprobs=logprobs)
    grammar = chat_grammar(
        tokenizer,
        thinking=options.thinking,
        response_format=format_dict(body.response_format),
        tools=tools,
        tool_choice=choice,
        is_parallel=body.parallel_tool_calls is not False,
    )
    reply_id = new_id("chatcmpl")
    return ChatPlan(
        id=reply_id,
        submit=Submit(
            request_id=body.rid or reply_id,
            token_ids=tuple(ids),
            params=params,
            n=n,
            priority=body.priority or 0,
            media=media,
            grammar=grammar,
            cache_salt=body.cache_salt or "",
        ),
        is_thinking=options.thinking,
        has_tools=bool(tools) and choice != "none",
        has_logprobs=logprobs is not None,
        num_past_calls=sum(len(message.tool_calls or ()) for message in body.messages),
        num_hidden=num_hidden,
    )


def thinking_options(body: ChatRequest, config: ServerConfig) -> ChatOptions:
    """Whether and how hard to think, out of the three places where a client may say so."""
    template = body.chat_template_kwargs
    kwargs: dict[str, object] = {} if template is None else template.model_dump(exclude_none=True)
    effort: object = body.reasoning_effort
    if body.thinking is not None:
        if body.thinking.type is not None:
            kwargs["thinking"] = body.thinking.type == "enabled"
            effort = None if effort == "none" else effort
        effort = effort if body.thinking.effort is None else body.thinking.effort
    if not config.is_thinking and not kwargs.keys() & {"thinking", "enable_thinking"} and effort is None:
        kwargs["thinking"] = False
    return chat_options(effort, kwargs, default_effort=config.default_effort)


def _num_logprobs(body: ChatRequest) -> int | None:
    top = body.top_logprobs
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise RequestError(f"top_logprobs must lie between 0 and {MAX_TOP_LOGPROBS}", param="top_logprobs")
    if not body.logprobs:
        if top:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return None
    return top or 0


def _tools(body: ChatRequest) -> list[dict[str, Any]]:
    """All tools, also those that system messages add. Errors: RequestError for a name given twice."""
    lists = [("tools", body.tools or [])]
    lists += [(f"messages[{i}].tools", message.tools or []) for i, message in enumerate(body.messages)]
    found: dict[str, dict[str, Any]] = {}
    for field, tools in lists:
        for j, tool in enumerate(tools):
            name = tool["function"]["name"]
            if name in found:
                raise RequestError(
                    f"{field}[{j}]: there is a tool {name} already; names must differ",
                    param=f"{field}[{j}].function.name",
                )
            found[name] = tool
    return list(found.values())


def _tool_choice(body: ChatRequest, tools: Sequence[dict[str, Any]]) -> str | dict[str, Any] | None:
    choice = body.tool_choice
    if isinstance(choice, NamedToolChoice):
        if choice.function.name not in [tool["function"]["name"] for tool in tools]:
            raise RequestError(
                f"tool_choice names {choice.function.name}, which is not in tools", param="tool_choice.function.name"
            )
        return choice.model_dump()
    if choice == "required" and not tools:
        raise RequestError("tool_choice is required, but there are no tools", param="tool_choice")
    return choice


def _prompt(
    body: ChatRequest,
    options: ChatOptions,
    choice: str | dict[str, Any] | None,
    config: ServerConfig,
    tokenizer: Tokenizer,
) -> tuple[list[int], tuple[MediaItem, ...], int]:
    """(ids with room for the pictures, the pictures, how many ids at the end open the answer's first channel)."""
    prompt = render(
        message_dicts(body.messages),
        tokenizer=tokenizer,
        tools=body.tools,
        thinking=options.thinking,
        effort=options.effort,
        tool_choice=choice,
        response_format=format_dict(body.response_format),
    )
    num_hidden = prompt.ids[::-1].index(tokenizer.special(OPEN)) + 1
    media = _media(prompt.images, config)
    if not media:
        return prompt.ids, (), num_hidden
    sizes = [m.grid[0] * m.grid[1] * m.grid[2] // PictureConfig().merge ** 2 for m in media]
    return expand_pads(prompt.ids, tokenizer.special(MEDIA_PAD), sizes), media, num_hidden


def _media(images: Sequence[Image.Image], config: ServerConfig) -> tuple[MediaItem, ...]:
    if not images:
        return ()
    size = config.patch_size
    if size is None:
        raise RequestError("this model reads no pictures; send text", param="messages")
    if len(images) > config.max_images:
        raise RequestError(f"{len(images)} pictures; send at most {config.max_images}", param="messages")
    pictures = [preprocess(image, PictureConfig(patch_size=size)) for image in images]
    return tuple(MediaItem(p.pixels.tobytes(), p.grid, size) for p in pictures)


def message_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The conversation in the form `chat` reads: as it came, without the fields nobody knows."""
    return [message.model_dump(exclude_unset=True) for message in messages]


def format_dict(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    """`response_format` as it came."""
    return None if response_format is None else response_format.model_dump(by_alias=True, exclude_unset=True)
