"""The Worker contract: what a server may ask of an engine process, and what comes back. Version 1.

Transport: pyzmq, one DEALER/ROUTER pair, each message one msgpack frame of a tagged union.
An engine that a server or a driver started says Hello when it is ready. One that runs on another host waits for an
Attach, answers with Hello or Refused, and is the caller's until Detach, or until the connection ends.
Not here: sockets (`engine/line.py` is one end; `server/client.py`, `rl/engine_link.py` the other).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from baltoro.protocol.completion import TokenDelta
from baltoro.protocol.sampling import SamplingParams

WIRE_VERSION = 1


class MediaItem(msgspec.Struct, frozen=True):
    """One preprocessed picture: `pixels` is float32 [t*h*w, 3, patch, patch], row-major bytes; `grid` is in patches."""

    pixels: bytes
    grid: tuple[int, int, int]
    patch_size: int


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """Start a request. `media` fills the runs of media-pad ids in `token_ids`, in order; a higher `priority` is served
    first and loses its memory last.

    `return_routed_experts`: the last delta has `routed_experts`; the engine must keep them.

    `grammar` is a llguidance grammar in its serialised JSON form; it rules from the first token on, or, when
    `grammar_after` is given, from the first position after that run of ids has been produced.
    """

    request_id: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    n: int = 1
    priority: int = 0
    media: tuple[MediaItem, ...] = ()
    grammar: str | None = None
    grammar_after: tuple[int, ...] | None = None
    adapter: str | None = None
    cache_salt: str = ""
    return_routed_experts: bool = False


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """End a request wherever it is; an empty id ends all."""

    request_id: str


class Flush(msgspec.Struct, frozen=True, tag="flush"):
    """Forget cached prefixes. Answered by Ack."""

    call_id: str


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="load_adapter"):
    """Load an adapter under a name, as a new version if the name is taken: from a folder on the engine's machine
    (`path`), or from the bytes of a safetensors file and the fields of its adapter_config.json. Answered by Ack with
    `info` {adapters: facts by name}."""

    call_id: str
    name: str
    path: str | None = None
    tensors: bytes = b""
    config: dict[str, object] = {}


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="unload_adapter"):
    """Refuse an adapter from now on. Answered by Ack, as LoadAdapter is, when its last running request has ended."""

    call_id: str
    name: str


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Give the pool's memory back; what runs waits, and what comes. Answered by Ack with `info` {given_back_bytes,
    resident_bytes}; one that sleeps already gives back 0."""

    call_id: str


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Take the memory again and go on. Answered by Ack with `info` {taken_bytes}."""

    call_id: str


class Look(msgspec.Struct, frozen=True, tag="look"):
    """Ask how full the engine is. Answered by Ack with `info` {pressure: the fields of `engine.pressure.Pressure`,
    adapters: facts by name}."""

    call_id: str


class Query(msgspec.Struct, frozen=True, tag="query"):
    """Ask for engine numbers. Answered by Ack with `info`."""

    call_id: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Finish what runs (`is_draining`) or abort it, then leave."""

    is_draining: bool = True


class Attach(msgspec.Struct, frozen=True, kw_only=True, tag="attach"):
    """A trainer wants this engine for itself. What its versions are: fields, expected (dtype and shape by name),
    running, must_change, bucket_bytes and timeout_s as in `engine.publish.PublishOptions`, under the adapter `name`."""

    version: int = WIRE_VERSION
    name: str
    fields: dict[str, object]
    expected: dict[str, tuple[str, tuple[int, ...]]] | None
    running: Literal["keep", "carry"]
    must_change: bool
    bucket_bytes: int
    timeout_s: float


class Detach(msgspec.Struct, frozen=True, tag="detach"):
    """The trainer leaves: what it asked for is aborted, and the engine waits for the next one. `why` in words."""

    why: str = "it said so"


class Deltas(msgspec.Struct, frozen=True, tag="deltas"):
    """What one step produced, for all requests of this client."""

    items: tuple[TokenDelta, ...]


class Ack(msgspec.Struct, frozen=True, kw_only=True, tag="ack"):
    """Answer to a call. `error` is None when it worked."""

    call_id: str
    error: str | None = None
    error_status: int | None = None
    error_param: str | None = None
    info: dict[str, object] = {}


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """First message of an engine: it is ready. `info` holds model facts and the resolved memory plan."""

    version: int = WIRE_VERSION
    info: dict[str, object] = {}


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Not with this caller: the reason, in words. The engine goes on."""

    reason: str


class Dying(msgspec.Struct, frozen=True, tag="dying"):
    """Last message of an engine that stops on its own: the reason, in words."""

    reason: str


ToEngine = Submit | Abort | Flush | LoadAdapter | UnloadAdapter | Sleep | Wake | Look | Query | Shutdown
FromTrainer = Attach | Detach | Submit | Abort | Sleep | Wake | Look | Query
"""What an engine on another host takes."""
FromEngine = Deltas | Ack | Hello | Refused | Dying
