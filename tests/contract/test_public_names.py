"""What a reader meets: every module, public class and public function says what it is; every signature has types."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import baltoro
from tests.contract.tree import Function, files, functions, parse, place


def missing_types(function: Function, is_method: bool) -> list[str]:
    """Parameters (and "return") of a signature that have no annotation."""
    spec = function.args
    parameters = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs]
    is_static = any(ast.unparse(decorator) == "staticmethod" for decorator in function.decorator_list)
    if is_method and not is_static and parameters:
        parameters = parameters[1:]
    parameters += [extra for extra in (spec.vararg, spec.kwarg) if extra is not None]
    missing = [parameter.arg for parameter in parameters if parameter.annotation is None]
    return missing + (["return"] if function.returns is None else [])


KERNELS = ("triton.jit", "gluon.jit")


def untyped(file: Path) -> list[str]:
    """Functions of a file, private ones too, that lack an annotation. Triton's kernel bodies need none."""
    module = parse(file)
    methods = {id(child) for node in ast.walk(module) if isinstance(node, ast.ClassDef) for child in node.body}
    hits = []
    for name, function in functions(module):
        if any(ast.unparse(decorator).split("(")[0] in KERNELS for decorator in function.decorator_list):
            continue
        missing = missing_types(function, id(function) in methods)
        if missing:
            hits.append(f"{place(file, function)}: {name} lacks {', '.join(missing)}")
    return hits


def undocumented(file: Path) -> list[str]:
    """The module, its public classes and its public functions that have no docstring.

    Methods are left to judgement: many names say it.
    """
    module = parse(file)
    hits = [] if ast.get_docstring(module) or not module.body else [f"{place(file)}: the module"]
    for node in module.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_") and not ast.get_docstring(node):
            hits.append(f"{place(file, node)}: {node.name}")
    return hits


def test_every_signature_is_typed() -> None:
    hits = [hit for file in files() for hit in untyped(file)]
    assert not hits, "\n".join(hits)


def test_every_public_name_has_a_docstring() -> None:
    hits = [hit for file in files() for hit in undocumented(file)]
    assert not hits, "\n".join(hits)


@pytest.mark.parametrize("name", baltoro.__all__)
def test_public_names_of_the_package_resolve(name: str) -> None:
    assert getattr(baltoro, name) is not None


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = baltoro.no_such_name


def test_gaps_are_found(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(
        "class A:\n    def f(self, x: int, *rest):\n        return x\n\ndef g(y) -> int:\n    return y\n"
        "@triton.jit\ndef _k(z):\n    pass\n"
    )
    assert [hit.split(": ")[1] for hit in untyped(file)] == ["A.f lacks rest, return", "g lacks y"]
    assert [hit.split(": ")[1] for hit in undocumented(file)] == ["the module", "A", "g"]


def test_kernel_bodies_need_no_types(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text("@triton.jit\ndef _kernel(x):\n    pass\n\ndef _launch(x):\n    pass\n")
    assert [hit.split(": ")[1] for hit in untyped(file)] == ["_launch lacks x, return"]
