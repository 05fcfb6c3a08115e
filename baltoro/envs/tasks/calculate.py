"""The calculator, as a program that a sandbox runs: the standard library alone.

In: an expression on stdin. Out: its value, or "error: ..." and exit status 1. Numbers, + - * / // % **, brackets; x and
× are *. What takes too long or too much memory is the sandbox's to end.
"""

from __future__ import annotations

import ast
import operator
import sys
from collections.abc import Callable, Mapping
from typing import Any

OPERATORS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip


def value(node: ast.AST) -> Any:
    """Errors: ValueError for anything but arithmetic."""
    match node:
        case ast.Expression(body):
            return value(body)
        case ast.Constant(number) if type(number) in (int, float):
            return number
        case ast.BinOp(left, sign, right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](value(left), value(right))
        case ast.UnaryOp(sign, operand) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](value(operand))
    raise ValueError("only numbers and + - * / // % ** ( ) can be worked out")


def main() -> None:
    """See the module."""
    text = sys.stdin.read().replace("x", "*").replace("×", "*").strip()
    try:
        found = value(ast.parse(text, mode="eval"))
        line = str(int(found) if isinstance(found, float) and found.is_integer() else found)
    except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError, TypeError) as error:
        line = f"error: {error or type(error).__name__}"
    sys.stdout.write(line)
    sys.exit(int(line.startswith("error")))


if __name__ == "__main__":
    main()
