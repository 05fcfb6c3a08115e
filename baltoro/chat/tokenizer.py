"""Token ids <-> text: a byte-level BPE in K3's file format, and decoding that never splits a character.

In: a directory with `tiktoken.model` (lines of base64 token and rank) and, if there is one, `tokenizer_config.json`
(`added_tokens_decoder` names control ids). Out: ids, bytes, text.
Invariants: a vocabulary is N base ranks (0..N-1, all 256 single bytes among them) and exactly 256 control ids
N..N+255, at K3's offsets whatever N is; text becomes a control id only when the caller says `allow_special`;
`decode_bytes` of ids is the concatenation of their bytes.
Limit: lone surrogates in the input become U+FFFD; nothing else is changed, there is no normalisation.
Source: K3's `tiktoken.model`, split pattern and chunking rule (`tokenization_kimi`).
"""

from __future__ import annotations

import base64
import binascii
import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import tiktoken

from baltoro.errors import ConfigError, RequestError

VOCAB_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"
NUM_CONTROL = 256

BOS, EOS, END_OF_MSG = "[BOS]", "[EOS]", "<|end_of_msg|>"
OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD = (
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
)

# Offsets from the first control id. The published file has 163,584 base ranks, so [BOS] is 163584 there.
CONTROL_OFFSETS: Mapping[str, int] = {
    BOS: 0,
    EOS: 1,
    END_OF_MSG: 2,
    OPEN: 3,
    CLOSE: 4,
    SEP: 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    MEDIA_BEGIN: 18,
    MEDIA_CONTENT: 19,
    MEDIA_END: 20,
    MEDIA_PAD: 21,
    "<osagent_mode>": 65,
    "[UNK]": 254,
    "[PAD]": 255,
}
# Named, but not flagged special: readers that skip special tokens keep them.
STRUCTURAL = frozenset({OPEN, CLOSE, SEP})

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Ordered: the first alternative that matches at a position wins. Needs class intersection (&&): tiktoken's engine,
# Oniguruma and `regex` with its V1 flag have it.
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

_CHUNK = 400_000  # code points handed to the BPE at once
_RUN = 25_000  # of these, the longest run that is all whitespace or all not: longer ones overflow regex engines
# The lookbehinds let a match start only where a run starts: without them the search is quadratic in the run.
_LONG_RUN = re.compile(rf"(?<!\s)\s{{{_RUN + 1},}}|(?<!\S)\S{{{_RUN + 1},}}")


def gpt2_byte_order() -> list[int]:
    """The 256 byte values in the order in which K3's file ranks them: printable ones first, as in GPT-2."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return printable + [b for b in range(256) if b not in set(printable)]


def chunks(text: str) -> Iterator[str]:
    """Cut `text` as K3 does before the BPE: every 400,000 code points, and in long runs of one kind every 25,000."""
    for start in range(0, len(text), _CHUNK):
        block = text[start : start + _CHUNK]
        done = 0
        for run in _LONG_RUN.finditer(block):
            for cut in range(run.start() + _RUN, run.end(), _RUN):
                yield block[done:cut]
                done = cut
        if done < len(block):
            yield block[done:]


class Tokenizer:
    """One vocabulary. Immutable after construction; safe to share between threads."""

    def __init__(self, ranks: Mapping[bytes, int], names: Mapping[int, str] | None = None) -> None:
        """`ranks` maps token bytes to 0..N-1; `names` renames control ids (absolute ids), the rest keep K3's names.

        Errors: ConfigError if ranks have gaps, lack a byte, or two control ids share a name.
        """
        _check_ranks(ranks)
        self.num_base = len(ranks)
        self.vocab_size = self.num_base + NUM_CONTROL
        self._ranks = dict(ranks)
        self._names = _control_names(self.num_base, names or {})
        self._ids = {name: id_ for id_, name in self._names.items()}
        if len(self._ids) != NUM_CONTROL:
            raise ConfigError("Two control ids share one name; give every entry of added_tokens_decoder its own.")
        self._bpe = tiktoken.Encoding(
            name="k3", pat_str=SPLIT_PATTERN, mergeable_ranks=self._ranks, special_tokens=self._ids
        )
        self._bytes = [b""] * self.vocab_size
        for token, rank in self._ranks.items():
            self._bytes[rank] = token
        for name, id_ in self._ids.items():
            self._bytes[id_] = name.encode()
        self.eos_ids = (self.special(END_OF_MSG), self.special(EOS))

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Read `tiktoken.model` (and names from `tokenizer_config.json`) of a model directory."""
        directory = Path(directory)
        path = directory / VOCAB_FILE
        if not path.is_file():
            raise ConfigError(f"{path} does not exist; a model directory needs the {VOCAB_FILE} of its tokenizer.")
        return cls(read_ranks(path), _read_names(directory / CONFIG_FILE))

    @classmethod
    def of_bytes(cls, merges: Iterable[bytes] = ()) -> Tokenizer:
        """The smallest vocabulary: the single bytes, then `merges` in their order. For tests and toy models."""
        tokens = dict.fromkeys([*(bytes([b]) for b in gpt2_byte_order()), *merges])
        return cls({token: rank for rank, token in enumerate(tokens)})

    def save(self, directory: str | Path) -> None:
        """Write `tiktoken.model` (in rank order) and `tokenizer_config.json` into `directory`, which is made."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        lines = (base64.b64encode(self._bytes[rank]) + b" %d\n" % rank for rank in range(self.num_base))
        (directory / VOCAB_FILE).write_bytes(b"".join(lines))
        (directory / CONFIG_FILE).write_text(json.dumps(self._config(), indent=2, ensure_ascii=False) + "\n")

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of `text`. Names of control ids are plain text unless `allow_special`. Nothing is added."""
        ids: list[int] = []
        for chunk in chunks(text):
            ids += self._bpe.encode(chunk, allowed_special="all") if allow_special else self._bpe.encode_ordinary(chunk)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD. `skip_special` drops all control ids but the
        structural three (open, close, sep), as K3's own tokenizer does."""
        if skip_special:
            ids = [i for i in ids if not self.is_special(i)]
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Bytes of `ids`; a control id gives its name. Errors: RequestError for an id outside the vocabulary."""
        return b"".join(map(self.token_bytes, ids))

    def token_bytes(self, token: int) -> bytes:
        """Bytes of one id. Errors: RequestError for an id outside the vocabulary."""
        if not 0 <= token < self.vocab_size:
            raise RequestError(
                f"Token id {token} is outside the vocabulary; use ids from 0 to {self.vocab_size - 1}.", param="tokens"
            )
        return self._bytes[token]

    def special(self, name: str) -> int:
        """The id of a control name. Errors: ConfigError if this vocabulary has none of that name."""
        id_ = self._ids.get(name)
        if id_ is None:
            raise ConfigError(f"This vocabulary has no control token {name!r}; name it in {CONFIG_FILE}.")
        return id_

    def control_name(self, token: int) -> str:
        """The name of a control id."""
        return self._names[token]

    def is_control(self, token: int) -> bool:
        """True for the 256 ids after the base vocabulary, named or not."""
        return self.num_base <= token < self.vocab_size

    def is_special(self, token: int) -> bool:
        """True for control ids that hide from users: all but the structural three."""
        return self.is_control(token) and self._names[token] not in STRUCTURAL

    def _config(self) -> dict[str, object]:
        """`tokenizer_config.json` as K3 and its readers write it; only named control ids are listed."""
        named = {i: n for i, n in self._names.items() if n != _reserved_name(i)}
        return {
            "added_tokens_decoder": {
                str(i): {
                    "content": name,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": name not in STRUCTURAL,
                }
                for i, name in sorted(named.items())
            },
            "additional_special_tokens": [],
            "bos_token": BOS,
            "eos_token": EOS,
            "unk_token": "[UNK]",
            "pad_token": "[PAD]",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 1_048_576,
            "tokenizer_class": "TikTokenTokenizer",
        }


class IncrementalDecoder:
    """Ids in pieces -> text in pieces, each a whole number of characters. Single writer: the stream it belongs to.

    The pieces put together equal `Tokenizer.decode` of all ids, however they were cut.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, ids: Sequence[int]) -> str:
        """The characters that these ids complete; bytes of an unfinished one are held back."""
        return self._utf8.decode(self._tokenizer.decode_bytes(ids))

    def flush(self) -> str:
        """What is still held back, as U+FFFD; the decoder is then as new."""
        rest = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return rest


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read a `tiktoken.model` file. Errors: ConfigError names the line that is not base64 and a rank."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ConfigError(
                f"{path}, line {number}: expected 'BASE64 RANK', found {line[:60]!r}; fetch the file again."
            ) from error
    return ranks


def _check_ranks(ranks: Mapping[bytes, int]) -> None:
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ConfigError(f"The ranks of a vocabulary must be 0..{len(ranks) - 1}, each once; the file has gaps.")
    missing = [b for b in range(256) if bytes([b]) not in ranks]
    if missing:
        raise ConfigError(
            f"The vocabulary lacks {len(missing)} single bytes (first: {missing[0]}); all 256 must be in."
        )


def _reserved_name(id_: int) -> str:
    return f"<|reserved_token_{id_}|>"


def _control_names(num_base: int, names: Mapping[int, str]) -> dict[int, str]:
    """Name of every control id. Entries of `names` outside the 256 are ignored: some configs list stale K2 ids."""
    defaults = {num_base + offset: name for name, offset in CONTROL_OFFSETS.items()}
    given = {i: name for i, name in names.items() if num_base <= i < num_base + NUM_CONTROL}
    taken = set(given.values())
    return {
        i: given.get(i) or (defaults[i] if i in defaults and defaults[i] not in taken else _reserved_name(i))
        for i in range(num_base, num_base + NUM_CONTROL)
    }


def _read_names(path: Path) -> dict[int, str]:
    if not path.is_file():
        return {}
    try:
        added = json.loads(path.read_text()).get("added_tokens_decoder", {})
        return {int(i): entry["content"] for i, entry in added.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: added_tokens_decoder must map ids to {{'content': NAME}}; {error}") from error
