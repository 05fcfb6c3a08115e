"""The vocabulary, its file format, the chunking rule and decoding in pieces."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from baltoro.chat.tokenizer import (
    CONTROL_OFFSETS,
    SPLIT_PATTERN,
    IncrementalDecoder,
    Tokenizer,
    chunks,
    gpt2_byte_order,
)
from baltoro.errors import ConfigError, RequestError

TOK = Tokenizer.of_bytes(
    [b"th", b"in", b"er", b" the", b"\n\n", "é".encode(), "你".encode(), b"\xf0\x9f", b"\xf0\x9f\x98"]
)

MIXED = [
    "The quick brown fox DOESN'T jump; it'LL walk 12345 steps.",
    "Привет, мир! Ёлка — это дерево. 北京大学ABC漢字かな交じり文 한국어",
    "مرحبا بالعالم، ٣٫١٤ वह पढ़ता है ภาษาไทย",
    "emoji 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 e\u0301 a\u0308\u0323 \u200d\ufeff",
    "def f(x):\n\treturn {k: v for k, v in x.items()}  # ok\r\n\r\n\n    \t  \nend   ",
    "<|open|>message role=\"user\"<|sep|>[BOS] &amp; &quot;<|close|>",
    "\x00\x1f\x7f\u2028\u3000 \xa0",
    "",
]  # fmt: skip


@pytest.mark.parametrize("text", MIXED)
def test_text_survives_encode_and_decode(text: str) -> None:
    assert TOK.decode(TOK.encode(text)) == text


@settings(deadline=None)
@given(st.text())
def test_any_text_survives_and_never_becomes_control_ids(text: str) -> None:
    ids = TOK.encode(text)
    assert TOK.decode_bytes(ids) == text.encode()
    assert not any(TOK.is_control(i) for i in ids)


def test_control_names_become_ids_only_when_allowed() -> None:
    text = f"a<|open|>b[EOS]<|reserved_token_{TOK.num_base + 8}|>"
    assert not any(TOK.is_control(i) for i in TOK.encode(text))
    ids = TOK.encode(text, allow_special=True)
    assert [TOK.decode([i]) for i in ids] == ["a", "<|open|>", "b", "[EOS]", f"<|reserved_token_{TOK.num_base + 8}|>"]
    assert TOK.decode(ids) == text


def test_control_ids_sit_at_k3_offsets_whatever_the_base_size() -> None:
    for name, offset in CONTROL_OFFSETS.items():
        assert TOK.special(name) == TOK.num_base + offset
    assert TOK.vocab_size == TOK.num_base + 256
    assert TOK.control_name(TOK.num_base + 240) == f"<|reserved_token_{TOK.num_base + 240}|>"
    assert TOK.eos_ids == (TOK.special("<|end_of_msg|>"), TOK.special("[EOS]"))


def test_skip_special_keeps_the_structural_three() -> None:
    ids = TOK.encode("<|open|>x<|sep|><|close|><|end_of_msg|>[PAD]<|media_pad|>", allow_special=True)
    assert TOK.decode(ids, skip_special=True) == "<|open|>x<|sep|><|close|>"


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("北京ABC大学", ["北京", "ABC", "大学"]),
        ("HelloWorld it's I'LL", ["Hello", "World", " it's", " I'LL"]),
        ("12345 6", ["123", "45", " ", "6"]),
        (" !?\n\nx", [" !?\n\n", "x"]),
        ("a/b", ["a", "/b"]),
        ("  \n  x   ", ["  \n", " ", " x", "   "]),
        ("かなABC", ["かな", "ABC"]),
    ],
)
def test_split_pattern_cuts_as_described(text: str, pieces: list[str]) -> None:
    """Checked in `regex`, whose V1 classes agree with tiktoken's engine; ids of the pieces = ids of the whole."""
    assert regex.compile(SPLIT_PATTERN, regex.V1).findall(text) == pieces
    assert TOK.encode(text) == [i for p in pieces for i in TOK.encode(p)]


def test_lowest_rank_merges_first_leftmost_on_ties_and_whole_pieces_win() -> None:
    tok = Tokenizer.of_bytes([b"aa", b"ab", b"aaab"])
    a, b = tok.encode("a") + tok.encode("b")
    assert tok.encode("aaa") == [256, a]
    assert tok.encode("aab") == [256, b]
    assert tok.encode("aaab") == [258]
    assert tok.encode("aaabb") == [258, b]
    assert Tokenizer.of_bytes([b"xabc"]).encode("xabc") == [256]  # no two bytes of it merge


def test_chunks_are_hard_borders_at_the_described_places() -> None:
    assert list(chunks("")) == []
    assert [len(c) for c in chunks("a " * 200_001)] == [400_000, 2]
    assert [len(c) for c in chunks("xy " + "a" * 60_000)] == [25_003, 25_000, 10_000]
    assert [len(c) for c in chunks("a" * 25_000 + " " * 25_000)] == [50_000]
    assert [len(c) for c in chunks("a" * 25_001)] == [25_000, 1]
    assert [len(c) for c in chunks("b" * 390_000)] == [25_000] * 15 + [15_000]
    text = "\x1c\u2003" * 13_000 + "z"
    assert [len(c) for c in chunks(text)] == [25_000, 1_001]


def test_long_runs_encode_in_bounded_time() -> None:
    for text in (" " * 150_000, "a" * 150_000, "\n" * 150_000, "é" * 60_000):
        assert TOK.decode(TOK.encode(text)) == text


@settings(deadline=None)
@given(st.lists(st.integers(0, TOK.vocab_size - 1), max_size=30), st.data())
def test_pieces_put_together_equal_the_whole(ids: list[int], data: st.DataObject) -> None:
    decoder = IncrementalDecoder(TOK)
    pieces, rest = [], ids
    while rest:
        cut = data.draw(st.integers(1, len(rest)))
        pieces.append(decoder.push(rest[:cut]))
        rest = rest[cut:]
    assert "".join(pieces) + decoder.flush() == TOK.decode(ids)


def test_no_piece_ends_inside_a_character() -> None:
    text = "é你😀👩‍👩‍👧"
    decoder = IncrementalDecoder(TOK)
    pieces = [decoder.push([i]) for i in TOK.encode(text)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert decoder.push(TOK.encode("你")[:1] if len(TOK.encode("你")) > 1 else TOK.encode("😀")[:1]) == ""
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_saved_vocabulary_loads_equal(tmp_path: Path) -> None:
    TOK.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.encode(MIXED[1]) == TOK.encode(MIXED[1])
    assert [again.token_bytes(i) for i in range(again.vocab_size)] == [
        TOK.token_bytes(i) for i in range(TOK.vocab_size)
    ]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    names = {int(i): e["content"] for i, e in config["added_tokens_decoder"].items()}
    assert names[TOK.num_base + 3] == "<|open|>"
    assert config["added_tokens_decoder"][str(TOK.num_base + 3)]["special"] is False


def test_names_of_the_config_file_win_and_stale_ids_are_ignored(tmp_path: Path) -> None:
    TOK.save(tmp_path)
    added = {str(TOK.num_base + 7): {"content": "<|mine|>"}, str(TOK.vocab_size + 5): {"content": "<|stale|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    again = Tokenizer.load(tmp_path)
    assert again.special("<|mine|>") == TOK.num_base + 7
    assert again.vocab_size == TOK.vocab_size
    with pytest.raises(ConfigError, match="stale"):
        again.special("<|stale|>")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"IQ== 0\nnot base64! 1\n", "line 2"),
        (b"IQ== 0\nIg== 2\n", "gaps"),
        (b"IQ== 0\nIg== 1\n", "lacks 254"),
    ],
)
def test_bad_vocabulary_files_are_explained(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        Tokenizer.load(tmp_path)


def test_missing_file_bad_config_and_bad_ids_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tiktoken\.model"):
        Tokenizer.load(tmp_path)
    TOK.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"x": 1}}')
    with pytest.raises(ConfigError, match="added_tokens_decoder"):
        Tokenizer.load(tmp_path)
    for bad in (-1, TOK.vocab_size):
        with pytest.raises(RequestError, match="outside the vocabulary"):
            TOK.decode([bad])


def test_trained_vocabulary_is_byte_complete_deterministic_and_round_trips(tmp_path: Path) -> None:
    corpus = [tmp_path / "a.txt", tmp_path / "b.txt"]
    corpus[0].write_text("the cat sat on the mat, the end. " * 40 + "naïve façade 你好世界 12 + 13 = 25\n" * 20)
    corpus[1].write_text("def add(a, b):\n    return a + b\n\n" * 30)
    script = Path(__file__).parents[2] / "scripts" / "data" / "train_vocab.py"
    for name, files in (("one", corpus), ("two", corpus[::-1])):
        command = [sys.executable, str(script), "--size", "560", "--out", str(tmp_path / name), *map(str, files)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert "304 ranks" in done.stdout
    one = (tmp_path / "one" / "tiktoken.model").read_bytes()
    assert one == (tmp_path / "two" / "tiktoken.model").read_bytes()
    first = [base64.b64decode(line.split()[0])[0] for line in one.splitlines()[:256]]
    assert first == gpt2_byte_order()
    tok = Tokenizer.load(tmp_path / "one")
    assert tok.vocab_size == 560
    for text in [*MIXED, corpus[0].read_text()]:
        assert tok.decode(tok.encode(text)) == text
    assert len(tok.encode(corpus[0].read_text())) < 0.6 * len(corpus[0].read_bytes())


def test_published_vocabulary_has_its_digest_ids_and_round_trips(k3_tok: Tokenizer, k3_dir: Path) -> None:
    digest = hashlib.sha256((k3_dir / "tiktoken.model").read_bytes()).hexdigest()
    assert digest == "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103"
    assert (k3_tok.num_base, k3_tok.vocab_size) == (163_584, 163_840)
    wanted = {
        "[BOS]": 163584, "[EOS]": 163585, "<|end_of_msg|>": 163586, "<|open|>": 163587, "<|close|>": 163588,
        "<|sep|>": 163589, "[start_header_id]": 163590, "[end_header_id]": 163591, "[EOT]": 163593,
        "<|media_begin|>": 163602, "<|media_content|>": 163603, "<|media_end|>": 163604, "<|media_pad|>": 163605,
        "<osagent_mode>": 163649, "[UNK]": 163838, "[PAD]": 163839, "<|reserved_token_163824|>": 163824,
    }  # fmt: skip
    for name, id_ in wanted.items():
        assert k3_tok.special(name) == id_
        assert k3_tok.encode(name, allow_special=True) == [id_]
    assert [k3_tok.token_bytes(i)[0] for i in range(256)] == gpt2_byte_order()
    for text in MIXED:
        assert k3_tok.decode(k3_tok.encode(text)) == text
