"""Manifests: what they say of tensors, and what they refuse."""

from __future__ import annotations

import msgspec
import pytest

from baltoro.errors import TransferError
from baltoro.transfer.manifest import ALIGN_BYTES, Manifest, Raw, check, decode, describe, raws, verify

TENSORS = {
    "a": Raw("fp32", (3, 5), memoryview(bytes(range(60)))),
    "b": Raw("bf16", (), memoryview(b"xy")),
    "none": Raw("uint8", (0, 4), memoryview(b"")),
    "c": Raw("uint8", (70,), memoryview(bytes(70))),
}
KINDS = {name: (raw.dtype, raw.shape) for name, raw in TENSORS.items()}


def flat(manifest: Manifest) -> bytearray:
    content = bytearray(manifest.num_bytes)
    for entry in manifest.tensors:
        content[entry.offset : entry.end] = TENSORS[entry.name].data
    return content


def refusal(manifest: Manifest, **options: object) -> str:
    with pytest.raises(TransferError) as caught:
        check(manifest, **options)  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"{caught.value.check}: ")
    return caught.value.check


def changed(manifest: Manifest, at: int, **fields: object) -> Manifest:
    tensors = list(manifest.tensors)
    tensors[at] = msgspec.structs.replace(tensors[at], **fields)
    return msgspec.structs.replace(manifest, tensors=tuple(tensors))


def test_a_manifest_survives_its_journey() -> None:
    manifest = describe(3, TENSORS)
    assert decode(manifest.encode()) == manifest
    check(manifest, expected=KINDS, version=2)
    assert all(entry.offset % ALIGN_BYTES == 0 for entry in manifest.tensors)


def test_bytes_come_back_under_their_names() -> None:
    manifest = describe(3, TENSORS)
    content = memoryview(flat(manifest))
    verify(manifest, content)
    assert {name: raw.data.tobytes() for name, raw in raws(manifest, content).items()} == {
        name: raw.data.tobytes() for name, raw in TENSORS.items()
    }


def test_every_flipped_byte_is_seen() -> None:
    manifest = describe(3, TENSORS)
    for entry in manifest.tensors:
        for at in range(entry.offset, entry.end):
            content = flat(manifest)
            content[at] ^= 1
            with pytest.raises(TransferError, match=f"digest: .*: {entry.name}"):
                verify(manifest, memoryview(content))


def test_the_digest_is_that_of_the_contents_alone() -> None:
    one, other = describe(1, TENSORS), describe(2, dict(reversed(TENSORS.items())))
    assert one.digest == other.digest
    assert one.digest != describe(1, TENSORS | {"b": Raw("bf16", (), memoryview(b"xz"))}).digest
    assert one.digest != describe(1, TENSORS | {"b": Raw("bf16", (1,), memoryview(b"xy"))}).digest


def test_bytes_that_are_not_those_of_the_shape_are_refused() -> None:
    with pytest.raises(TransferError, match="shapes: w has 3 bytes"):
        describe(1, {"w": Raw("fp32", (1,), memoryview(b"abc"))})
    with pytest.raises(TransferError, match="dtypes are"):
        describe(1, {"w": Raw("float32", (1,), memoryview(b"abcd"))})


def test_refusals_are_named() -> None:
    manifest = describe(3, TENSORS)
    assert refusal(Manifest(version=1, tensors=())) == "empty"
    assert refusal(msgspec.structs.replace(manifest, format=2)) == "format"
    assert refusal(manifest, version=3) == "version"
    assert refusal(changed(manifest, 1, name="a")) == "names"
    assert refusal(manifest, expected=KINDS | {"d": ("bf16", ())}) == "names"
    assert refusal(manifest, expected={"a": KINDS["a"]}) == "names"
    assert refusal(manifest, expected=KINDS | {"a": ("fp32", (5, 3))}) == "shapes"
    assert refusal(changed(manifest, 0, num_bytes=59)) == "shapes"
    assert refusal(changed(manifest, 1, offset=0)) == "layout"
    assert refusal(changed(manifest, 3, offset=1 << 40)) == "layout"
    assert refusal(manifest, before=describe(2, TENSORS), version=2) == "unchanged"
    check(manifest, before=describe(2, TENSORS), version=2, must_change=False)


def test_what_is_no_manifest_is_refused() -> None:
    for text in (b"", b"{}", b'{"version": "x", "tensors": []}'):
        with pytest.raises(TransferError, match="format"):
            decode(text)
