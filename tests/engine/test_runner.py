"""What the runner tells the model: pictures, places, rows; prompt scores; faults of one request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from baltoro.engine.batch import Plan, Result
from baltoro.engine.media import media_runs
from baltoro.engine.plan_builder import PlanBuilder
from baltoro.engine.request import MediaRun
from baltoro.errors import RequestError
from baltoro.model.config import VisionConfig
from baltoro.model.context import ForwardContext
from baltoro.protocol.sampling import SamplingParams
from baltoro.protocol.worker import MediaItem, Submit
from tests.engine.stub import EOS, StubModel, expected, logits_after, make_engine, run, stub_config, submit, tokens_of

PAD = 50
VISION = VisionConfig(patch_size=2, merge=2, hidden_size=8, qkv_hidden_size=8, num_heads=2)


def _picture(height: int, width: int, frames: int = 1, first: float = 0.0) -> MediaItem:
    """Pixels that count up from `first`, so that each patch can be told from every other."""
    count = frames * height * width * 3 * 2 * 2
    values = np.arange(count, dtype=np.float32) + first
    return MediaItem(values.tobytes(), (frames, height, width), 2)


def _config() -> object:
    return stub_config(vision=VISION, media_token_id=PAD)


@pytest.mark.parametrize("max_batch_tokens", [1, 3, 5, 100])
def test_every_pad_gets_its_own_feature_however_the_prompt_is_cut(max_batch_tokens: int) -> None:
    """Two pictures (6 and 2 pads); each step's rows and picks, put together, cover every pad once."""
    pictures = (_picture(4, 6), _picture(2, 4, frames=2, first=1000.0))
    prompt = [1, 2, *[PAD] * 6, 3, *[PAD] * 2, 4]
    model = StubModel(_config())  # type: ignore[arg-type]
    engine = make_engine(model, max_batch_tokens=max_batch_tokens)
    params = SamplingParams(temperature=0.0, max_tokens=3)
    engine.add(Submit(request_id="a", token_ids=tuple(prompt), params=params, media=pictures))
    run(engine)
    seen: dict[int, tuple[int, int]] = {}
    for ctx in model.contexts:
        if ctx.media is None:
            continue
        firsts = {(1, 4, 6): 0, (2, 2, 4): 1}
        features = [(firsts[grid], n) for grid in ctx.media.grids for n in range(grid[1] * grid[2] // 4)]
        assert ctx.media.pixels.shape == (sum(t * h * w for t, h, w in ctx.media.grids), 3, 2, 2)
        for row, pick in zip(ctx.media.rows.tolist(), ctx.media.picks.tolist(), strict=True):
            assert int(ctx.tokens[row]) == PAD
            seen[int(ctx.spans.positions[row])] = features[pick]
    assert seen == {2 + n: (0, n) for n in range(6)} | {9: (1, 0), 10: (1, 1)}


def test_pictures_of_several_requests_share_a_step() -> None:
    model = StubModel(_config())  # type: ignore[arg-type]
    engine = make_engine(model, max_batch_tokens=100)
    for i in range(2):
        ids = (1, PAD, PAD, 2 + i)
        params = SamplingParams(temperature=0.0, max_tokens=1)
        engine.add(Submit(request_id=f"r{i}", token_ids=ids, params=params, media=(_picture(2, 4, first=100.0 * i),)))
    run(engine)
    media = model.contexts[0].media
    assert media is not None
    assert media.rows.tolist() == [1, 2, 5, 6] and media.picks.tolist() == [0, 1, 2, 3]
    assert media.pixels[8].flatten()[0] == 100.0, "pixels follow their grids"


def test_a_sampled_pad_is_no_picture() -> None:
    model = StubModel(_config())  # type: ignore[arg-type]
    engine = make_engine(model, retract_every=3)
    submit(engine, "a", [1, 2], max_tokens=6, logit_bias={PAD: 100.0})
    assert tokens_of(run(engine)["a", 0]) == [PAD] * 6
    assert all(ctx.media is None for ctx in model.contexts)


def test_pads_and_pictures_that_do_not_match_are_refused() -> None:
    config = stub_config(vision=VISION, media_token_id=PAD)
    runs = media_runs([1, PAD, PAD, PAD, PAD], [_picture(2, 4), _picture(4, 2)], config)
    assert [(r.first, r.last) for r in runs] == [(1, 3), (3, 5)]
    assert isinstance(runs[0], MediaRun)
    for ids, items, reason in (
        ([1, PAD], [_picture(2, 4)], "needs 2 media pads"),
        ([PAD, 1, PAD], [_picture(2, 4)], "in a row"),
        ([PAD, PAD, PAD], [_picture(2, 4)], "has 3 media pads, its pictures fill 2"),
        ([PAD], [], "has 1 media pads"),
        ([PAD, PAD], [_picture(2, 3)], "multiples of 2"),
        ([PAD, PAD], [MediaItem(b"", (1, 2, 4), 2)], "0 bytes"),
        ([PAD, PAD], [MediaItem(b"", (1, 2, 4), 14)], "must have 2"),
    ):
        with pytest.raises(RequestError, match=reason):
            media_runs(ids, items, config)
    with pytest.raises(RequestError, match="no vision tower"):
        media_runs([1], [_picture(2, 4)], stub_config())


def _prompt_scores(prompt: Sequence[int]) -> list[float]:
    return [
        float(torch.log_softmax(logits_after(prompt[:at], stub_config()), -1)[prompt[at]])
        for at in range(1, len(prompt))
    ]


@pytest.mark.parametrize("max_batch_tokens", [1, 7, 100])
@pytest.mark.parametrize("max_logit_rows", [1, 5, 256])
@pytest.mark.parametrize("n", [1, 2])
def test_prompt_logprobs_are_complete_and_told_once(max_batch_tokens: int, max_logit_rows: int, n: int) -> None:
    prompt = [(5 * i) % 59 for i in range(23)]
    model = StubModel()
    engine = make_engine(model, max_batch_tokens=max_batch_tokens, max_logit_rows=max_logit_rows, retract_every=4)
    submit(engine, "other", [3, 4, 5], max_tokens=12, prompt_logprobs=0)
    submit(engine, "a", prompt, n=n, max_tokens=4, prompt_logprobs=2, logprobs=1)
    deltas = run(engine)
    first, *rest = deltas["a", 0]
    assert first.prompt_logprobs is not None and first.prompt_top_logprobs is not None
    assert first.prompt_logprobs[0] is None and first.prompt_top_logprobs[0] is None
    assert np.allclose(first.prompt_logprobs[1:], _prompt_scores(prompt), atol=1e-6)
    assert all(tops is not None and len(tops) == 2 for tops in first.prompt_top_logprobs[1:])
    assert all(delta.prompt_logprobs is None for delta in rest)
    if n == 2:
        assert all(delta.prompt_logprobs is None for delta in deltas["a", 1])
    other = deltas["other", 0][0]
    assert other.prompt_logprobs is not None and np.allclose(other.prompt_logprobs[1:], _prompt_scores([3, 4, 5]))
    assert other.prompt_top_logprobs is None
    limit = max_logit_rows + 3  # prompt scores, and one row for each request that draws
    assert all(ctx.logit_rows is not None and len(ctx.logit_rows) <= limit for ctx in model.contexts)


def test_output_logprobs_are_those_of_the_script() -> None:
    engine = make_engine()
    submit(engine, "a", [1, 2, 3], max_tokens=5, logprobs=3, temperature=0.7, seed=1)
    found, tokens = run(engine)["a", 0], [1, 2, 3]
    for delta in found:
        raw = torch.log_softmax(logits_after(tokens, stub_config()), -1)
        assert delta.logprobs is not None and delta.top_logprobs is not None
        assert np.isclose(delta.logprobs[0], float(raw[delta.token_ids[0]]), atol=1e-6)
        assert [t.token for t in delta.top_logprobs[0]] == raw.topk(3).indices.tolist()
        tokens += delta.token_ids


class _Broken(StubModel):
    """Gives NaN for requests whose first token is 13."""

    def __call__(self, ctx: ForwardContext) -> Tensor:
        logits = super().__call__(ctx)
        assert ctx.logit_rows is not None
        for at, row in enumerate(ctx.logit_rows.tolist()):
            n = sum(offset <= row for offset in ctx.spans.offsets) - 1
            if ctx.spans.starts[n] == 0 and int(ctx.tokens[ctx.spans.offsets[n]]) == 13:
                logits[at] = torch.nan
        return logits


def test_a_request_without_numbers_fails_alone() -> None:
    engine = make_engine(_Broken())
    submit(engine, "good", [1, 2], max_tokens=4)
    submit(engine, "bad", [13, 2], max_tokens=4)
    deltas = run(engine)
    (failure,) = deltas["bad", 0]
    assert failure.finish_reason == "error" and failure.error_status == 500 and "finite" in str(failure.error)
    assert tokens_of(deltas["good", 0]) == expected([1, 2], SamplingParams(temperature=0.0, max_tokens=4))


def test_a_plan_without_draws_has_no_logit_rows() -> None:
    model = StubModel()
    engine = make_engine(model, max_batch_tokens=4)
    submit(engine, "a", [1] * 8, max_tokens=1)
    plan = engine.scheduler.plan()
    assert isinstance(plan, Plan)
    result = engine.runner.run(plan)
    assert result == Result([], []) and model.contexts[0].logit_rows is not None
    assert len(model.contexts[0].logit_rows) == 0
    assert not PlanBuilder(1, 1)


def test_the_end_token_ends_unless_it_is_ignored_or_comes_too_early() -> None:
    bias = {EOS: 100.0}
    engine = make_engine(StubModel(can_end=True))
    submit(engine, "ends", [1], logit_bias=bias)
    submit(engine, "goes on", [1], logit_bias=bias, ignore_eos=True, max_tokens=3)
    submit(engine, "ends later", [1], logit_bias=bias, min_tokens=3)
    submit(engine, "other stop", [1], logit_bias={7: 100.0}, stop_token_ids=(7,))
    deltas = run(engine)
    (end,) = deltas["ends", 0]
    assert (end.token_ids, end.finish_reason, end.stop_reason, end.num_trimmed) == ((EOS,), "stop", EOS, 1)
    assert tokens_of(deltas["goes on", 0]) == [EOS] * 3 and deltas["goes on", 0][-1].finish_reason == "length"
    assert len(deltas["ends later", 0]) == 4 and EOS not in tokens_of(deltas["ends later", 0])[:3]
    (other,) = deltas["other stop", 0]
    assert other.stop_reason == 7 and other.num_trimmed == 1
