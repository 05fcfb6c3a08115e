"""Bodies of the OpenAI API as clients send them, field for field, and the fields that K3 servers add.

In: JSON bytes of a request body. Out: a validated model, or a RequestError that names the field at fault.
Invariants: unknown fields are ignored, as OpenAI-compatible servers do; a known field of a wrong type is an error,
never guessed; tools and schemas are kept as they came, since the prompt shows them to the model.
Not here: ranges of sampling parameters (`protocol.sampling`), what is sent back (`protocol.openai_reply`).
Source: OpenAI API reference (chat, completions); Moonshot's K3 additions: thinking, reasoning_content, dynamic tools.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.json_schema import models_json_schema

from baltoro.errors import RequestError

# Whole numbers travel on to the engine in 64 bits.
Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Body(BaseModel):
    """Base of everything a client sends."""

    model_config = ConfigDict(extra="ignore", strict=True)


class FunctionSpec(Body):
    """What a tool is called and takes. The letters are those that fit into a call's tag and id."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$", max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolSpec(Body):
    """One entry of `tools`."""

    type: Literal["function"]
    function: FunctionSpec


def _check_tool(tool: dict[str, Any]) -> dict[str, Any]:
    ToolSpec.model_validate(tool)
    return tool


# A tool that was checked and stays the dict that came.
Tool = Annotated[dict[str, Any], AfterValidator(_check_tool)]


class ImageUrl(Body):
    """Where a picture is: a `data:` URL."""

    url: str
    detail: str | None = None


class ContentPart(Body):
    """A piece of a message's content."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: ImageUrl | None = None


class CalledFunction(Body):
    """Name and arguments (a JSON text) of a call in the history."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Body):
    """A call that an assistant turn made."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One turn. `tools` on a system message without content adds tools from there on."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    tools: list[Tool] | None = None


class NamedFunction(Body):
    """The function a `tool_choice` names."""

    name: str


class NamedToolChoice(Body):
    """`tool_choice` that forces one function."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchemaFormat(Body):
    """The schema an answer must match."""

    model_config = ConfigDict(extra="ignore", strict=True, populate_by_name=True)

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StreamOptions(Body):
    """`include_internal_content` is Moonshot's: each increment also carries the ids it is made of."""

    include_usage: bool | None = None
    include_internal_content: bool | None = None


class Thinking(Body):
    """Moonshot's switch for the think channel."""

    type: Literal["enabled", "disabled"] | None = None
    effort: str | None = None


class TemplateOptions(Body):
    """`chat_template_kwargs`: the names that K3 servers read."""

    thinking: bool | None = None
    enable_thinking: bool | None = None
    thinking_effort: str | None = None


class SamplingBody(Body):
    """The fields that chat and completions share. None everywhere means: the server's default."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    ignore_eos: bool | None = None
    seed: Int | None = None
    n: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    rid: str | None = None
    priority: Int | None = None
    cache_salt: str | None = None


class ChatRequest(SamplingBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    thinking: Thinking | None = None
    chat_template_kwargs: TemplateOptions | None = None


class CompletionRequest(SamplingBody):
    """POST /v1/completions. `prompt` is one text, several, one list of ids, or several."""

    prompt: str | list[str] | list[Int] | list[list[Int]]
    logprobs: Int | None = None
    echo: bool | None = None
    best_of: Int | None = None
    suffix: str | None = None


class TokenizeRequest(Body):
    """POST /v1/tokenize: a text (`prompt`, or `text`) or a conversation."""

    model: str | None = None
    prompt: str | None = None
    text: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: TemplateOptions | None = None


class DetokenizeRequest(Body):
    """POST /v1/detokenize."""

    model: str | None = None
    tokens: list[Int]


Request = TypeVar("Request", bound=Body)


def json_schemas(ref_template: str) -> dict[str, Any]:
    """JSON schemas of the bodies, by name; `ref_template` has {model} where references name one."""
    bodies = (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
    _, whole = models_json_schema([(body, "validation") for body in bodies], ref_template=ref_template)
    schemas: dict[str, Any] = whole["$defs"]
    return schemas


def parse(kind: type[Request], body: bytes) -> Request:
    """A validated body. Errors: RequestError with `param` in OpenAI's spelling, such as messages[0].content."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _request_error(error) from error


def _request_error(error: ValidationError) -> RequestError:
    """The most specific complaint: unions complain once per branch, the deepest one knows most."""
    found = error.errors(include_url=False, include_input=False)
    worst = max(found, key=lambda e: len(e["loc"]))
    if worst["type"] == "json_invalid":
        return RequestError(f"the body is not valid JSON: {worst['ctx']['error']}", code="invalid_json")
    param = _spell(worst["loc"])
    siblings = [e for e in found if _spell(e["loc"]) == param]
    text = "; or ".join(dict.fromkeys(e["msg"][:1].lower() + e["msg"][1:] for e in siblings))
    return RequestError(f"{param or 'the body'}: {text}", param=param or None)


def _spell(loc: tuple[int | str, ...]) -> str:
    """("messages", 0, "content", "list[Part]", 1) -> messages[0].content[1]; labels of union branches drop out."""
    spelled = ""
    for part in loc:
        if isinstance(part, int):
            spelled += f"[{part}]"
        elif part not in _BRANCHES and not part[:1].isupper() and not {"[", "("} & set(part):
            spelled += f".{part}" if spelled else part
    return spelled


_BRANCHES = frozenset({"str", "int", "float", "bool", "none"})
