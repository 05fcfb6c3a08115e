"""Where layers keep what must outlive a step: the two kinds of state, as tensors the cache hands to the model.

KDA layers overwrite one slot per request (recurrent state and conv history); MLA layers append one row per token.
Training has neither: `ForwardContext.cache` is None.
Not here: who owns which slot or page (`cache/`), the bytes they lie in (`cache/pool.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class CacheViews:
    """Views into the arena, one tensor a layer, in layer order within its kind.

    recurrent  one [U, H, V, K] per KDA layer, FP32 (FP64 for a float64 model), V-first
    conv       one [U, W-1, 3*H*K] per KDA layer, activation dtype; channels q | k | v, oldest tap first
    kv         one [P, page_size, R+Dr] per MLA layer, activation dtype: normed latent | shared key part
    routes     one int16 [P * page_size, A] per layer with experts, by row of the flat KV cache: what its router took
               for the token of that row; empty: nobody keeps them
    Slot 0 and page 0 are sinks: they may be written, nothing reads them.
    """

    recurrent: tuple[Tensor, ...]
    conv: tuple[Tensor, ...]
    kv: tuple[Tensor, ...]
    routes: tuple[Tensor, ...] = ()
