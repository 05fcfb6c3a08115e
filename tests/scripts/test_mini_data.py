"""Corpora of the mini model: plain text from the documentation's sources, right sums, weights on what is to be said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from baltoro.chat.messages import normalise
from baltoro.chat.segments import encode_segments
from baltoro.chat.tokenizer import Tokenizer
from baltoro.chat.xtml import render, segments
from baltoro.trainer.corpus import open_corpus, read_manifest
from scripts.data import build_mini, pydocs, rst, sums

SOURCE = """\
:mod:`json` --- JSON encoder
============================

.. module:: json
   :synopsis: Encode.

.. index:: pair: a; b

See :rfc:`7159`, :func:`dump` and :class:`~json.JSONEncoder`, *obj* in ``a*b*c`` (`site <https://x>`_) [#note]_.

.. function:: dump(obj, fp, *, \\
                   indent=None)
              dumps(obj)
   :noindex:

   Write *obj*::

      >>> dump({"a": 1}, **options)  # *not* emphasis

   .. versionadded:: 3.2
   .. versionchanged:: 3.6
      Keyword only.

.. note:: Mind the
   gap.

.. exception:: JSONDecodeError(msg)
"""

PLAIN = """\
# json --- JSON encoder

See RFC 7159, dump() and JSONEncoder, obj in `a*b*c` (site).

dump(obj, fp, *, indent=None)
dumps(obj)

   Write obj:

      >>> dump({"a": 1}, **options)  # *not* emphasis

   New in version 3.2.
   Changed in version 3.6.
      Keyword only.

Note: Mind the
   gap.

exception JSONDecodeError(msg)
"""


def test_sources_become_what_a_reader_sees() -> None:
    assert rst.plain(SOURCE) == PLAIN


def test_sections_are_cut_at_headings_and_lose_nothing() -> None:
    text = "# A\n\nshort\n\n# B\n\n" + "long " * 100 + "\n\n# C\n\nend\n"
    parts = rst.sections(text, shortest=100)
    assert "".join(parts) == text and [part[:3] for part in parts] == ["# A", "# C"]


def test_library_texts_stand_in_for_a_missing_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "mod.py").write_text('"""' + "A module that does things. " * 20 + '"""\ndef f():\n    """Short."""\n')
    (tmp_path / "broken.py").write_text("def (")
    monkeypatch.setattr(pydocs.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    pages, source = pydocs.pages(None)
    names = [page.name for page in pages]
    assert "library/mod.py" in names and "topics/assert" in names and len(pages) == source.documents
    assert source.licence == "PSF-2.0"


def test_every_pair_of_digits_comes_and_every_sum_is_right() -> None:
    seen = set()
    for conversation in sums.conversations(300, seed=5):
        for asked, said in zip(conversation.messages, conversation.messages[1:], strict=False):
            if said["role"] == "assistant" and (found := re.fullmatch(r"(\d) \+ (\d) = (\d+)\.", said["content"])):
                a, b, total = (int(group) for group in found.groups())
                assert a + b == total
                assert {str(a), str(b)} <= set(re.findall(r"\d", asked["content"]))
                assert said.get("reasoning_content", said["content"]).endswith(f"{a} + {b} = {total}.")
                assert ("reasoning_content" in said) == conversation.thinking
                seen.add((a, b))
    assert len(seen) == 100


def test_worked_thinking_counts_up() -> None:
    assert sums.worked(3, 8) == "Start at 8 and count up 3: 9, 10, 11. 3 + 8 = 11."
    assert sums.worked(0, 4) == "0 + 4 = 4." and sums.worked(9, 8) == "9 + 8 = 17."


@pytest.mark.parametrize("thinking", [True, False])
def test_weights_are_on_the_answers_and_ids_are_those_of_the_served_prompt(thinking: bool) -> None:
    tokenizer = Tokenizer.of_bytes()
    talk = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "1 + 2 = 3."}]
    if thinking:
        talk[1]["reasoning_content"] = "Easy."
    again = [*talk, {"role": "user", "content": "4+4"}]
    document = build_mini.document_of(sums.Conversation([*again, talk[1]], thinking, None), tokenizer)
    assert document.weights is not None
    first, second = (render(messages, tokenizer=tokenizer, thinking=thinking).ids for messages in (talk[:1], again))
    assert list(document.ids[: len(first)]) == first and list(document.ids[: len(second)]) == second
    said = tokenizer.decode([i for i, weight in zip(document.ids, document.weights, strict=True) if weight])
    body = "1 + 2 = 3.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    thought = "Easy.<|close|>think<|sep|><|open|>response<|sep|>" if thinking else ""
    assert said == (thought + body) * 2
    whole = segments(normalise([*again, talk[1]]), build_mini.Options(thinking=thinking), has_prefix=False)
    assert list(document.ids) == encode_segments(whole, tokenizer)


def test_builder_writes_corpora_vocabulary_and_manifest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    docs = tmp_path / "docs" / "library"
    docs.mkdir(parents=True)
    for n in range(60):
        words = " ".join(f"word{n * 7 + i} of page {i}" for i in range(60))
        (docs / f"page{n}.rst.txt").write_text(f"Page {n}\n=======\n\n{words}.\n")
    monkeypatch.setattr(build_mini, "VOCAB_SIZE", 576)
    monkeypatch.setattr(build_mini, "HELD_OUT", 5)
    monkeypatch.setattr(build_mini, "NUM_CONVERSATIONS", {"train": 40, "eval": 8})
    build_mini.main(["--out", str(tmp_path / "out"), "--docs", str(tmp_path / "docs")])
    manifest = read_manifest(tmp_path / "out")
    assert manifest.vocab_size == Tokenizer.load(tmp_path / "out").vocab_size == 576
    for split in ("train", "eval"):
        prose, dialogue = manifest.entry("docs", split), manifest.entry("sums", split)  # type: ignore[arg-type]
        assert prose.is_divisible and not dialogue.is_divisible and dialogue.has_weights
        assert prose.sources[0].licence == "PSF-2.0" and len(prose.sources[0].sha256) == 64
        assert open_corpus(tmp_path / "out", prose).tokens.max() < 576
    assert manifest.entry("sums", "train").documents == 40
