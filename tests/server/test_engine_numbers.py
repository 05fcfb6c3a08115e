"""The table of metrics against the engine that fills it, and against the page that explains it."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from baltoro.server.engine_numbers import COUNTERS, GAUGES
from baltoro.server.health import Metrics
from tests.engine.stub import make_engine, run, submit
from tests.server.conftest import Lab
from tests.server.process import ROOT

# told by /server_info only: counted by the server too, or of use to people who look at the engine itself
NOT_ON_THE_PAGE = {
    *("pages_used", "slots_used", "num_steps", "prompt_tokens", "generation_tokens", "num_finished_reqs"),
    *("num_aborted_reqs", "policy_version", "host_entries"),
}


def test_an_engine_with_every_tier_fills_the_whole_table_and_nothing_is_left_over(tmp_path: Path) -> None:
    engine = make_engine(
        prefix_cache=True, hash_endpoint=4, track_interval=8, host_cache_bytes=6_000, disk_cache_dir=str(tmp_path)
    )
    submit(engine, "a", range(30))
    run(engine)
    numbers = engine.stats()
    engine.close()
    assert numbers.keys() - NOT_ON_THE_PAGE == GAUGES.keys() | COUNTERS.keys()
    families = {family.name: family for family in text_string_to_metric_families(_page(numbers))}
    for name, kind in [(n, "gauge") for n in GAUGES] + [(n.removesuffix("_total"), "counter") for n in COUNTERS]:
        assert families[f"baltoro:{name}"].type == kind
        assert len(families[f"baltoro:{name}"].samples) == 1


def test_the_page_for_people_has_the_same_names_and_words() -> None:
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    gauges, counters = text.split("Counters, since the engine started")
    for table, part in ((GAUGES, gauges.split("Gauges, of now")[1]), (COUNTERS, counters)):
        assert dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", part, re.MULTILINE)) == table


def test_what_an_engine_does_not_have_is_not_on_the_page() -> None:
    page = _page(make_engine().stats())
    assert "baltoro:mamba_usage" in page and "baltoro:cache_" not in page and "baltoro:host" not in page


def test_an_engine_that_does_not_answer_leaves_the_last_numbers() -> None:
    metrics = Metrics("tiny")
    for answer in ({"cache_tokens": 64, "cache_hit_rate": "x"}, {}):
        page = metrics.page(answer).decode()
        assert 'baltoro:cache_tokens{model_name="tiny"} 64.0' in page and "cache_hit_rate" not in page


async def test_cached_tokens_are_counted_once_for_all_answers_to_a_prompt(lab: Lab) -> None:
    lab.engine.num_cached = 64
    prompts = [[97] * 70, [98] * 70]
    reply = await lab.post("/v1/completions", {"prompt": prompts, "n": 3, "max_tokens": 2})
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 2 * 64
    assert reply["usage"]["prompt_tokens"] == 140
    chat = await lab.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 90}], "n": 3})
    assert chat["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
    answers = await lab.post("/generate", {"text": "y" * 70, "sampling_params": {"n": 3}})
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [64, 64, 64]
    assert 'baltoro:cached_tokens_total{model_name="tiny"} 256.0' in (await lab.http.get("/metrics")).text


def _page(numbers: dict[str, object]) -> str:
    return Metrics("tiny").page(numbers).decode()
