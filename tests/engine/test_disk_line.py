"""Prefixes that the host had to give up come back from the disk, whoever else waits in line."""

from __future__ import annotations

from pathlib import Path

from baltoro.protocol.sampling import SamplingParams
from tests.engine.stub import expected, make_engine, run, submit, tokens_of


def test_each_of_a_line_of_resends_is_found_again(tmp_path: Path) -> None:
    """All four prompts together do not fit on device and host. Asked for when they came, they would push each other
    out before their turn; what is still being written when its turn comes is waited for."""
    engine = make_engine(
        prefix_cache=True,
        hash_endpoint=4,
        track_interval=4,
        num_pages=14,
        num_slots=3,
        max_running=1,
        max_context=48,
        host_cache_bytes=9000,
        disk_cache_dir=str(tmp_path),
    )
    prompts = {name: [at] * 3 + list(range(25 + at)) for at, name in enumerate("abcd")}
    for name, prompt in prompts.items():
        submit(engine, name, prompt, max_tokens=4)
        run(engine)
    for name, prompt in prompts.items():
        submit(engine, f"{name} again", prompt, max_tokens=4)
    deltas = run(engine, max_steps=20_000)
    for name, prompt in prompts.items():
        found = deltas[f"{name} again", 0]
        assert tokens_of(found) == expected(prompt, SamplingParams(temperature=0.0, max_tokens=4))
        assert found[0].num_cached_tokens == (len(prompt) - 1) // 4 * 4, name
    engine.close()
