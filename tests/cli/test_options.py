from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from baltoro.cli.box import find_model
from baltoro.cli.options import bind, default_sampling, read_key, size_bytes
from baltoro.cli.serve import serve
from baltoro.cli.serving import check_vocabulary
from baltoro.errors import ConfigError, UserError
from tests.tiny import tiny_k3


def make(folder: Path, weights_bytes: int = 0) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x" * weights_bytes)
    return folder


@pytest.mark.parametrize(
    ("text", "size"), [("7", 7), ("1KiB", 1024), ("1.5k", 1500), ("4GiB", 4 << 30), ("2 MB", 2_000_000), ("1T", 10**12)]
)
def test_sizes(text: str, size: int) -> None:
    assert size_bytes(text, "--memory") == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1Q", "GiB", "1 2"])
def test_what_is_no_size_is_told_with_its_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--memory"):
        size_bytes(text, "--memory")


def test_a_key_is_given_or_read_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sesame\nsecond line")
    assert read_key(None) is None
    assert read_key("open") == "open"
    assert read_key(f"@{tmp_path}/key") == "sesame"
    for bad in ("", f"@{tmp_path}/none"):
        with pytest.raises(ConfigError):
            read_key(bad)


def test_a_taken_port_is_known_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="--port"):
        bind("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError):
        bind("127.0.0.1", 70000)


def test_sampling_defaults_are_those_of_the_folder(tmp_path: Path) -> None:
    assert default_sampling(tmp_path) == {}
    said = {"temperature": 0.6, "top_p": 0.95, "do_sample": True, "eos_token_id": 3}
    (tmp_path / "generation_config.json").write_text(json.dumps(said))
    assert default_sampling(tmp_path) == {"temperature": 0.6, "top_p": 0.95}
    (tmp_path / "generation_config.json").write_text("[")
    with pytest.raises(ConfigError):
        default_sampling(tmp_path)


def test_the_named_model_comes_before_the_environment_and_that_before_the_box(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("baltoro.cli.box.PACKAGE", tmp_path / "elsewhere" / "baltoro")
    monkeypatch.delenv("BALTORO_MODEL", raising=False)
    with pytest.raises(ConfigError, match="baltoro train"):
        find_model(None)
    small, large = make(tmp_path / "models" / "z", 1), make(tmp_path / "models" / "a", 2)
    assert find_model(None).resolve() == large
    other = make(tmp_path / "other")
    monkeypatch.setenv("BALTORO_MODEL", str(other))
    assert find_model(None) == other
    assert find_model(small) == small
    with pytest.raises(ConfigError, match="no model folder"):
        find_model(tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"memory": "lots"}, "--memory"),
        ({"page_size": 48}, "page_size"),
        ({"effort": "medium"}, "--effort"),
        ({"max_body": "x"}, "--max-body"),
        ({"port": 70000}, "--port"),
        ({"api_key": ""}, "--api-key"),
    ],
)
def test_an_option_that_cannot_be_used_is_told_before_anything_starts(
    tmp_path: Path, options: dict[str, Any], words: str
) -> None:
    folder = make(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps(tiny_k3().to_json()))
    with pytest.raises(UserError, match=words):
        serve(folder, **options)


def test_a_tokenizer_smaller_than_the_model_is_refused() -> None:
    check_vocabulary(521, 521)
    with pytest.raises(ConfigError, match="do not fit"):
        check_vocabulary(522, 521)
