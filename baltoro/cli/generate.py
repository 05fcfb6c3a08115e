"""`baltoro generate`: complete prompts or answer messages offline, in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from baltoro.cli.memory import CacheOptions, takes_cache_options

if TYPE_CHECKING:
    from baltoro.protocol.completion import Completion

Prompts = Annotated[list[str] | None, typer.Argument(help="Prompts. Without any, standard input is one.")]
Model = Annotated[Path | None, typer.Option(help="Model folder. Default: BALTORO_MODEL, else the one in models/.")]
Chat = Annotated[bool, typer.Option("--chat", help="Each prompt is a user's message in the chat protocol.")]
System = Annotated[str | None, typer.Option(help="System message, with --chat.")]
Thinking = Annotated[bool, typer.Option("--thinking/--no-thinking", help="Whether a chat answer is thought out.")]
Effort = Annotated[str | None, typer.Option(help="How hard to think: low, high or max.")]
MaxTokens = Annotated[int, typer.Option(help="Tokens of an answer at most.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy. Default: the model's, else 1.")]
TopP = Annotated[float | None, typer.Option(help="Smallest set of tokens that holds this much probability.")]
TopK = Annotated[int | None, typer.Option(help="The k likeliest tokens.")]
MinP = Annotated[float | None, typer.Option(help="Tokens at least this likely, relative to the likeliest.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends an answer; may be given several times.")]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Makes sampling repeatable.")]
Count = Annotated[int, typer.Option("-n", help="Answers for each prompt.")]
Logprobs = Annotated[int | None, typer.Option(help="Logprobs in the JSON: of the tokens (0) and of the k best.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object a line, with ids and the reason of the end.")]
Memory = Annotated[str, typer.Option(help="Bytes for KV and state, such as 4GiB. auto: a share of what is free.")]
Dtype = Annotated[str, typer.Option(help="auto, bfloat16, float32 or float64.")]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]


@takes_cache_options
def generate(
    prompts: Prompts = None,
    model: Model = None,
    chat: Chat = False,
    system: System = None,
    thinking: Thinking = True,
    effort: Effort = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    stop: Stop = None,
    seed: SeedOption = None,
    n: Count = 1,
    logprobs: Logprobs = None,
    json: Json = False,
    memory: Memory = "auto",
    dtype: Dtype = "auto",
    device: Device = "cpu",
    *,
    cache: CacheOptions,
) -> None:
    """Complete prompts, or answer messages with --chat, offline.

    Examples:

        baltoro generate --model models/mini "The dictionary"

        baltoro generate --chat --no-thinking --temperature 0 "What is 3+4?"

        baltoro generate --json -n 4 --seed 1 --stop "." "The list" "The tuple"
    """
    from baltoro.cli.box import find_model
    from baltoro.cli.options import default_sampling, size_bytes
    from baltoro.llm import LLM
    from baltoro.protocol.sampling import SamplingParams

    folder = find_model(model)
    asked = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p, "seed": seed}
    fields: dict[str, Any] = default_sampling(folder) | {k: v for k, v in asked.items() if v is not None}
    params = SamplingParams(max_tokens=max_tokens, stop=tuple(stop or ()), logprobs=logprobs, **fields)
    memory_bytes = "auto" if memory == "auto" else size_bytes(memory, "--memory")
    llm = LLM(folder, memory_bytes=memory_bytes, dtype=dtype, device=device, **cache.engine_fields())
    texts = prompts or [sys.stdin.read()]
    progress = len(texts) * n > 1 and sys.stderr.isatty()
    if chat:
        first = [{"role": "system", "content": system}] if system else []
        talks = [[*first, {"role": "user", "content": text}] for text in texts]
        answers = llm.chat(talks, params, thinking=thinking, effort=effort, n=n, progress=progress)
    else:
        answers = llm.generate(texts, params, n=n, progress=progress)
    for answer in answers:
        print(_line(answer) if json else _plain(answer), flush=True)
    if any(answer.finish_reason == "error" for answer in answers):
        sys.exit(1)


def _line(answer: Completion) -> str:
    """One JSON object, without what is not there."""
    import msgspec

    fields = {key: value for key, value in msgspec.to_builtins(answer).items() if value not in (None, [])}
    return msgspec.json.encode(fields).decode()


def _plain(answer: Completion) -> str:
    """Text for people: thoughts in <think>, calls as JSON."""
    import msgspec

    parts = [] if answer.reasoning is None else [f"<think>{answer.reasoning}</think>"]
    parts.append(answer.text if answer.error is None else f"(failed: {answer.error})")
    parts += [msgspec.json.encode(call).decode() for call in answer.tool_calls]
    return "\n".join(parts)
