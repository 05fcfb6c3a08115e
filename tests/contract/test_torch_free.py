"""Rooms and modules that must load without torch: the server process, the command's help, sizes and names.

One fresh interpreter imports them all; the first import of torch is reported with the lines of ours that led to it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.tree import PACKAGE, ROOT, files, module_name, room

TORCH_FREE_ROOMS = {"config", "errors", "observe", "protocol", "chat", "server", "router", "sandbox", "envs"}
TORCH_FREE_ROOMS |= {"__main__", "__init__"}  # --help and `import baltoro` answer at once
TORCH_FREE_FILES = {"model/sizes.py", "model/names.py", "model/config_json.py", "model/inspect.py"}
TORCH_FREE_FILES |= {
    "model/adapter_names.py",
    "model/tensor_file.py",
    "model/vision_names.py",
    "model/weight_files.py",
    "parallel/mesh.py",
    "parallel/shard.py",
}

PROBE = """
import json, sys, traceback
from importlib import import_module

class Witness:
    trace = None
    def find_spec(self, name, path=None, target=None):
        if name == "torch" and self.trace is None:
            frames = traceback.extract_stack()
            self.trace = [f"{f.filename}:{f.lineno}" for f in frames if "importlib" not in f.filename]
        return None

witness = Witness()
sys.meta_path.insert(0, witness)
for name in json.loads(sys.argv[1]):
    import_module(name)
    if "torch" in sys.modules:
        print(json.dumps({"module": name, "trace": witness.trace}))
        break
"""


def torch_free_files(package: Path = PACKAGE) -> list[Path]:
    """Files that may not load torch. Every `config.py`, wherever it is, is one."""

    def is_one(file: Path) -> bool:
        name = file.relative_to(package).as_posix()
        return room(file, package) in TORCH_FREE_ROOMS or file.name == "config.py" or name in TORCH_FREE_FILES

    return [file for file in files(package) if is_one(file)]


def first_torch_import(names: list[str], root: Path) -> dict[str, object] | None:
    """Which of the modules loads torch, imported one after the other; None if none does."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(names)], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if done.stdout else None


@pytest.mark.slow
def test_torch_free_rooms_do_not_load_torch() -> None:
    names = [module_name(file) for file in torch_free_files()]
    assert "baltoro" in names and "baltoro.model.config" in names
    guilty = first_torch_import(names, ROOT)
    assert guilty is None, f"{guilty and guilty['module']} loads torch, by way of {guilty and guilty['trace']}"


def test_a_hidden_torch_import_is_found(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")  # a stand-in, so that this test is fast
    (tmp_path / "inner.py").write_text("import torch")
    (tmp_path / "outer.py").write_text("import inner")
    (tmp_path / "clean.py").write_text("")
    assert first_torch_import(["clean"], tmp_path) is None
    guilty = first_torch_import(["clean", "outer"], tmp_path)
    assert guilty is not None and guilty["module"] == "outer"
    assert any("inner.py:1" in line for line in guilty["trace"])  # type: ignore[attr-defined]
