"""What the trainer's process holds of memory between two steps: the claim that the base is there once, as numbers.

In: the trainer, the policy. Out: fields of a line of `metrics.jsonl`.
On a GPU: bytes that torch's allocator has handed out (memory mapped from another process is not its), less what is the
trainer's own by arithmetic (factors, masters, AdamW's state); the rest is what would be a copy of the base. Workspaces
of cuBLAS are given back first: they are of its library, as large as a tiny base, and come again when they are needed.
On a CPU: the proportional set size of the map in this process; with the engine's it adds up to one base.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from baltoro.rl.policy import Policy
from baltoro.trainer.policy_step import PolicyTrainer
from baltoro.transfer.shared_base import share_of


def memory_line(trainer: PolicyTrainer, policy: Policy) -> dict[str, Any]:
    """`memory`: base_bytes and own_bytes; on a GPU allocated, rest and peak bytes and the rest's share of the base; on
    a CPU, where the base is a map, this process's share of it and the engine's."""
    found: dict[str, Any] = {"base_bytes": base_bytes(trainer), "own_bytes": own_bytes(trainer)}
    device = trainer.model.device
    if device.type == "cuda":
        clear_workspaces()
        allocated = torch.cuda.memory_allocated(device)
        rest = allocated - found["own_bytes"]
        found |= {
            "allocated_bytes": allocated,
            "rest_bytes": rest,
            "rest_share": rest / found["base_bytes"],
            "peak_bytes": torch.cuda.max_memory_allocated(device),
        }
        torch.cuda.reset_peak_memory_stats(device)
        return {"memory": found}
    facts = getattr(policy, "info", {}).get("base")
    if facts is not None and Path("/proc/self/smaps").exists():
        own, engine = (share_of(facts["path"], pid) for pid in (None, getattr(policy, "process_id", None)))
        found |= {"map_bytes": facts["num_bytes"]}
        found |= {"trainer_map_bytes": own.proportional_bytes, "engine_map_bytes": engine.proportional_bytes}
    return {"memory": found}


def base_bytes(trainer: PolicyTrainer) -> int:
    """Of all tensors of the frozen model as they lie, once each."""
    return sum(tensor.nbytes for tensor in trainer.model.stored().values())


def own_bytes(trainer: PolicyTrainer) -> int:
    """Factors with their scales, masters where they are others, and what AdamW keeps."""
    tensors = [*trainer.factors, *(one.scale for one in trainer.bank.factors.values())]
    tensors += [m for m, f in zip(trainer.masters, trainer.factors, strict=True) if m is not f]
    for state in trainer.adam.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    device = trainer.model.device
    return sum(tensor.nbytes for tensor in tensors if tensor.device.type == device.type)


def clear_workspaces() -> None:
    """Give cuBLAS's workspaces back to torch's allocator, where this torch can."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
