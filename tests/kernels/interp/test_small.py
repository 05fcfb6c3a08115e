"""Norm, gated activations, and what stands before and behind latent attention, under the interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.small import SHAPES, check_enter, check_glu, check_leave, check_norm

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 700), (5, 64)])
def test_norm_of_rows_with_a_stride(rows: int, width: int, dtype: torch.dtype) -> None:
    check_norm(rows, width, dtype, "cpu")


@DTYPES
@pytest.mark.parametrize(("rows", "width"), [(1, 700), (3, 512)])
def test_activations_of_two_halves(rows: int, width: int, dtype: torch.dtype) -> None:
    check_glu(rows, width, dtype, "cpu")


@DTYPES
@pytest.mark.parametrize("name", list(SHAPES))
def test_what_enters_latent_attention(name: str, dtype: torch.dtype) -> None:
    check_enter(SHAPES[name], dtype, "cpu")


@DTYPES
@pytest.mark.parametrize("name", list(SHAPES))
def test_what_leaves_latent_attention(name: str, dtype: torch.dtype) -> None:
    check_leave(SHAPES[name], dtype, "cpu")
