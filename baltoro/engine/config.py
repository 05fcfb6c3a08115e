"""EngineConfig: what the user asked of an engine. No torch.

"auto" is resolved once, by `planner.py`, and shown. Nothing here changes after it was built.
Errors: ConfigError names the field and says what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from baltoro.cache.retention import RETENTION_NAMES
from baltoro.errors import ConfigError

Auto = Literal["auto"]
DTYPES = ("auto", "bfloat16", "float32", "float64")
MAX_WINDOW = 8
"""Of `verify_window`: what the kernels take, again here because they need torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine.

    page_size         positions per KV page: a power of two up to 64, or a multiple of the hash endpoint
    max_batch_tokens  tokens of one step, decodes and pieces of prompts together
    max_running       requests that hold memory at once
    max_waiting       requests that may wait; the next one is refused with QueueFull
    max_context       prompt and output of one request; auto: what the model allows and the pool holds
    memory_bytes      arena; auto: a share of the machine, and not more than max_running requests can use
    num_pages, num_slots   override what memory_bytes would give
    prefix_cache      keep prefixes and find them again
    hash_endpoint     tokens between places at which a prefix can be found; auto: 512, for small models the chunk of KDA
    track_interval    tokens between state checkpoints while a request decodes: a multiple of the grid; auto: 256 or the
                      grid, if that is larger
    retention         which state checkpoints live: turns, interval, prompt_end, second_hit (docs/ideas/checkpoints.md)
    pool              unified: pages and slots share one arena without a border; fixed: the border stays
    overlap           plan the next step while one is on the device; auto: on a GPU
    host_cache_bytes  host memory for prefixes that the device had to give up; 0 is none
    disk_cache_dir, disk_cache_bytes   a directory for what the host tier has to give up; empty is none
    retract_to        what becomes of a request that loses its memory: host (a copy, if the tier has room) or recompute
    long_prompt_tokens, long_share   requests with a longer prompt hold at most this share of memory and of a step while
                      shorter ones wait; 0 is off
    max_loras         adapters in one step, each in a slot of its own on the device; 0 serves none
    max_lora_rank     largest rank that a slot holds
    lora_experts      whether slots have room for factors of routed experts
    max_loaded_loras  adapters kept in host memory; 0 is no limit. The longest unused is dropped and refused from then
                      on
    lora_modules      adapters to load at the start, NAME=PATH
    base_path         write the base to this file (in /dev/shm, say) and work on the mapped bytes, which a trainer on
                      this machine can map too; empty: keep it in this process
    expert_weights    packed: MXFP4 experts as the file has them; dense: the values they stand for; auto: dense on a CPU
                      that has the base for itself and where they take at most 1 GiB
    expert_inputs     mxfp8: what the routed experts' products read is rounded to MXFP8 (W4A8); plain: it is not. A
                      policy trainer on this engine does the same
    keeps_routed_experts  which experts the routers took lies behind the KV of each token, so that a request may ask for
                      it (return_routed_experts); 2 bytes a token, layer and expert taken
    max_logit_rows    rows whose logits one step may hold for prompt logprobs (each is vocab_size values)
    graph_batch       steps of up to so many decodes are captured as CUDA graphs at the start; 0 is off
    verify_window     tokens of a draft window, the last drawn one and its drafts: verify steps get their memory, and
                      are captured with graph_batch; 0 is off. The scheduler plans none yet
    retract_every     debugging: take the memory of one running request every so many steps; 0 is off
    is_poisoned       debugging: fill memory that changes hands with NaN
    """

    page_size: int = 64
    max_batch_tokens: int = 1024
    max_running: int = 64
    max_waiting: int = 4096
    max_context: int | Auto = "auto"
    memory_bytes: int | Auto = "auto"
    num_pages: int | Auto = "auto"
    num_slots: int | Auto = "auto"
    prefix_cache: bool = True
    hash_endpoint: int | Auto = "auto"
    track_interval: int | Auto = "auto"
    retention: str = "turns"
    pool: Literal["unified", "fixed"] = "unified"
    overlap: bool | Auto = "auto"
    host_cache_bytes: int = 0
    disk_cache_dir: str = ""
    disk_cache_bytes: int = 10 * 2**30
    retract_to: Literal["host", "recompute"] = "recompute"
    long_prompt_tokens: int = 0
    long_share: float = 0.5
    max_loras: int = 0
    max_lora_rank: int = 32
    lora_experts: bool = True
    max_loaded_loras: int = 0
    lora_modules: tuple[str, ...] = ()
    base_path: str = ""
    expert_weights: Literal["auto", "packed", "dense"] = "auto"
    expert_inputs: Literal["plain", "mxfp8"] = "plain"
    keeps_routed_experts: bool = False
    max_logit_rows: int = 256
    dtype: str = "auto"
    device: str = "cpu"
    seed: int = 0
    graph_batch: int = 0
    verify_window: int = 0
    retract_every: int = 0
    is_poisoned: bool = False

    def __post_init__(self) -> None:
        size = self.page_size
        is_power = 1 <= size <= 64 and size & (size - 1) == 0
        is_multiple = self.hash_endpoint != "auto" and size >= 1 and size % self.hash_endpoint == 0
        is_open = self.hash_endpoint == "auto" and size > 64  # the planner sees the endpoint and checks again
        advice = "must be a power of two up to 64, or a multiple of hash_endpoint"
        _need(is_power or is_multiple or is_open, "page_size", size, advice)
        _need(self.pool in ("unified", "fixed"), "pool", self.pool, "must be unified or fixed")
        _need(self.retract_to in ("host", "recompute"), "retract_to", self.retract_to, "must be host or recompute")
        known = f"is not known: use one of {', '.join(RETENTION_NAMES)}"
        _need(self.retention in RETENTION_NAMES, "retention", self.retention, known)
        self._check_tiers()
        _need(0.0 < self.long_share <= 1.0, "long_share", self.long_share, "must be above 0 and at most 1")
        for name in ("host_cache_bytes", "disk_cache_bytes", "long_prompt_tokens", "max_loras", "max_loaded_loras"):
            _need(getattr(self, name) >= 0, name, getattr(self, name), "must not be negative")
        advice = "needs slots to serve it: give max_loras too"
        _need(self.max_loras > 0 or not self.lora_modules, "lora_modules", self.lora_modules, advice)
        for name in ("max_batch_tokens", "max_running", "max_waiting", "max_logit_rows", "max_lora_rank"):
            _need(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        for name in ("max_context", "memory_bytes", "num_pages", "num_slots", "hash_endpoint", "track_interval"):
            value = getattr(self, name)
            _need(value == "auto" or value >= 1, name, value, 'must be "auto" or at least 1')
        _need(self.dtype in DTYPES, "dtype", self.dtype, f"must be one of {', '.join(DTYPES)}")
        kinds = ("auto", "packed", "dense")
        _need(self.expert_weights in kinds, "expert_weights", self.expert_weights, f"must be one of {', '.join(kinds)}")
        advice = "must be plain or mxfp8"
        _need(self.expert_inputs in ("plain", "mxfp8"), "expert_inputs", self.expert_inputs, advice)
        is_alone = not (self.base_path and self.expert_weights == "dense")
        _need(
            is_alone, "expert_weights", "dense", "a base that others map stays packed: leave base_path empty, or auto"
        )
        _need(self.graph_batch >= 0, "graph_batch", self.graph_batch, "must be 0 (off) or a number of decodes")
        is_on_gpu = self.device.startswith("cuda")
        _need(is_on_gpu or not self.graph_batch, "graph_batch", self.graph_batch, "needs a GPU: set device to cuda")
        self._check_window()
        _need(self.retract_every >= 0, "retract_every", self.retract_every, "must be 0 (off) or a number of steps")
        _need(self.seed >= 0, "seed", self.seed, "must not be negative")

    def _check_window(self) -> None:
        """The kernels take windows of up to MAX_WINDOW tokens; one of a single token has no draft in it."""
        window, advice = self.verify_window, f"must be 0 (off) or 2 .. {MAX_WINDOW}: a drawn token and its drafts"
        _need(window == 0 or 2 <= window <= MAX_WINDOW, "verify_window", window, advice)
        advice = "is more than a step takes: raise max_batch_tokens"
        _need(window <= self.max_batch_tokens, "verify_window", window, advice)
        advice = "is more than prompt and output of a request: raise max_context"
        _need(self.max_context == "auto" or window < self.max_context, "verify_window", window, advice)

    def _check_tiers(self) -> None:
        """A tier that would silently do nothing is refused."""
        has_host = self.host_cache_bytes > 0
        advice = "is the tier of an evicted prefix, and prefix_cache is off: switch it on, or leave this 0"
        _need(self.prefix_cache or not has_host, "host_cache_bytes", self.host_cache_bytes, advice)
        advice = "stands behind the host tier: give host_cache_bytes too"
        _need(has_host or not self.disk_cache_dir, "disk_cache_dir", self.disk_cache_dir, advice)
        advice = "needs a host tier to copy to: give host_cache_bytes too"
        _need(has_host or self.retract_to != "host", "retract_to", self.retract_to, advice)


def _need(is_good: bool, name: str, value: object, advice: str) -> None:
    if not is_good:
        raise ConfigError(f"{name} {value!r} {advice}")
