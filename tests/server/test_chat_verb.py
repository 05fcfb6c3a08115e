from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console

from baltoro.cli.chat import converse
from baltoro.cli.talk import Talker
from baltoro.errors import ConfigError, PeerError, RequestError
from tests.server.conftest import Lab, MakeLab
from tests.server.live import listening

ANSWER = "hm<|close|>think<|sep|><|open|>response<|sep|>yes [b]<|close|>response<|sep|><|close|>message<|sep|>"


class Typed(Console):
    """A console whose user types what is written down, then leaves."""

    def __init__(self, *lines: str) -> None:
        super().__init__(file=io.StringIO(), force_terminal=True, width=80, highlight=False)
        self._lines: Iterator[str] = iter(lines)

    def input(self, *_: Any, **__: Any) -> str:
        for line in self._lines:
            return line
        raise EOFError

    @property
    def text(self) -> str:
        assert isinstance(self.file, io.StringIO)
        return self.file.getvalue()


async def talk(lab: Lab, console: Typed, **options: Any) -> None:
    async with listening(lab.app) as port:
        talker = Talker(f"http://127.0.0.1:{port}/v1", None)
        await asyncio.to_thread(converse, talker, console, options, [{"role": "system", "content": "S"}])


def prompts(lab: Lab) -> list[str]:
    return [lab.tokenizer.decode(submit.token_ids) for submit in lab.engine.submits]


async def test_thoughts_are_dimmed_and_answers_are_not(lab: Lab) -> None:
    lab.say(ANSWER)
    console = Typed("hi")
    await talk(lab, console)
    assert "\x1b[2mh" in console.text
    assert "\ny" in console.text and "[b]" in console.text


async def test_the_conversation_grows_and_reset_forgets_it(lab: Lab) -> None:
    lab.say(ANSWER)
    await talk(lab, Typed("one", "", "two", "/reset", "three", "/exit", "four"))
    first, second, third = prompts(lab)
    assert "one" in second and "hm<|close|>think" in second and "yes [b]" in second and "two" in second
    assert "one" not in third and third.count('role="system"') == 1
    assert "two" not in first


async def test_options_are_sent(lab: Lab) -> None:
    lab.say(ANSWER)
    await talk(lab, Typed("hi"), temperature=0.25, max_tokens=7)
    assert (lab.submit.params.temperature, lab.submit.params.max_tokens) == (0.25, 7)


async def test_a_refused_question_is_told_and_not_remembered(lab: Lab) -> None:
    lab.say(ANSWER)
    console = Typed("x" * 9000, "hi")
    await talk(lab, console)
    assert "context is 4096 tokens" in console.text.replace("\n", " ")
    assert "xxx" not in prompts(lab)[-1]


async def test_an_engine_lost_in_mid_answer_is_told(lab: Lab) -> None:
    lab.say(ANSWER, stall_at=3)
    console = Typed("hi")
    talking = asyncio.create_task(talk(lab, console))
    await lab.engine.until(lambda: len(lab.engine.submits) == 1)
    await lab.worker.query()
    lab.worker.lose("exit code 1")
    await talking
    assert "exit code 1" in console.text


async def test_the_key_is_sent(make_lab: MakeLab) -> None:
    lab = await make_lab(api_key="sesame")
    async with listening(lab.app) as port:
        assert await asyncio.to_thread(Talker(f"127.0.0.1:{port}", "sesame").model) == "tiny"
        with pytest.raises(RequestError, match="401"):
            await asyncio.to_thread(Talker(f"127.0.0.1:{port}", None).model)


def test_a_server_that_is_not_there_is_a_peer_error() -> None:
    with pytest.raises(PeerError, match="baltoro serve"):
        Talker("http://127.0.0.1:1", None).model()
    with pytest.raises(ConfigError):
        Talker("ftp://x", None)
