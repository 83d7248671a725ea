"""Products by packed weights equal those by plain ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from gleanrl.utils import products
from gleanrl.utils.products import Product, can_pack, linear_packed, pack

CPU = torch.device("cpu")


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rows", [1, 7, 130])
def test_a_product_by_several_weights_equals_float64(
    monkeypatch: pytest.MonkeyPatch, rows: int, dtype: torch.dtype, tolerance: float, packs: bool
) -> None:
    if packs and not can_pack(dtype):
        pytest.skip(f"this installation does not pack {dtype}")
    monkeypatch.setattr(products, "can_pack", lambda dtype: packs)
    x, bias = torch.randn(rows, 24).to(dtype), torch.randn(19).to(dtype)
    product = Product([torch.Size((size, 24)) for size in (11, 5, 3)], dtype, CPU)
    for _ in range(2):  # weights are replaced by new ones
        weights = [torch.randn(size, 24).to(dtype) for size in (11, 5, 3)]
        for index in (2, 0, 1):
            product.load(index, weights[index])
        expected = F.linear(x.double(), torch.cat(weights).double(), bias.double())
        spread = float(expected.std())
        torch.testing.assert_close(product(x, bias).double(), expected, rtol=0, atol=tolerance * spread)
        torch.testing.assert_close(product(x).double(), expected - bias.double(), rtol=0, atol=tolerance * spread)


def test_a_float16_product_is_not_packed() -> None:
    assert not can_pack(torch.float16)


def test_a_bias_may_be_strided() -> None:
    if not can_pack(torch.float32):
        pytest.skip("this installation does not pack float32")
    x, weight, bias = torch.randn(3, 24), torch.randn(19, 24), torch.randn(38)[::2]
    torch.testing.assert_close(linear_packed(x, pack(weight), bias), F.linear(x, weight, bias))


def test_products_are_computed_with_few_different_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """OneDNN compiles code for each number of rows, and keeps it."""
    if not can_pack(torch.float32):
        pytest.skip("this installation does not pack float32")
    product = Product([torch.Size((5, 24))], torch.float32, CPU)
    weight = torch.randn(5, 24)
    product.load(0, weight)
    numbers: list[int] = []

    def counted(x: torch.Tensor, *arguments: torch.Tensor | None) -> torch.Tensor:
        numbers.append(len(x))
        return linear_packed(x, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(products, "linear_packed", counted)
    for rows in range(300):
        x = torch.randn(rows, 24)
        torch.testing.assert_close(product(x), F.linear(x, weight))
        assert rows <= numbers[-1] <= 1.13 * rows
    assert len(set(numbers)) < 60


def test_a_load_that_ended_early_leaves_nothing_to_the_next_one() -> None:
    product = Product([torch.Size((2, 4))] * 3, torch.float32, CPU)
    old, new = torch.ones(2, 4), torch.full((2, 4), 2.0)
    for index in (0, 1):
        product.load(index, old)
    product.start()
    for index in (2, 1, 0):
        product.load(index, new)
    assert torch.equal(product(torch.ones(1, 4)), torch.full((1, 6), 8.0))
