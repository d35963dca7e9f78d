"""FP8 in blocks: the bound of its error, and that a wrong block or a scale in the wrong place breaks it."""

import pytest
import torch

from megasao.conversion.blocks import BLOCK, FP8, dequantize_blocks, quantize_blocks, scale_shape


def bound(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Largest error that is allowed of each number, from the definition of e4m3 and of a block's scale."""
    largest = weight.abs().clone()
    for row in range(0, weight.shape[0], block[0]):
        for column in range(0, weight.shape[1], block[1]):
            part = largest[row : row + block[0], column : column + block[1]]
            part.fill_(part.max())
    return torch.maximum(weight.abs() / 16, largest / 448 / 1024) * 1.0001


def uneven(rows: int, columns: int) -> torch.Tensor:
    """Blocks of very different size, so that a scale in the wrong place shows."""
    torch.manual_seed(rows)
    sizes = 10.0 ** torch.randint(-6, 7, scale_shape((rows, columns)))
    return torch.randn(rows, columns) * sizes.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]


@pytest.mark.parametrize("shape", [(128, 128), (576, 300), (1, 1), (130, 1000), (384, 256)])
def test_every_number_comes_back_within_the_bound(shape: tuple[int, int]) -> None:
    weight = uneven(*shape)
    quantized, scale = quantize_blocks(weight)
    assert (quantized.dtype, scale.dtype, quantized.shape) == (FP8, torch.float32, shape)
    assert scale.shape == scale_shape(shape)
    back = dequantize_blocks(quantized, scale)
    assert (back - weight).abs().le(bound(weight, BLOCK)).all()
    # The other way of writing the definition: each number times the scale of its block.
    spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    assert torch.equal(back, quantized.float() * spread)


def test_kv_down_projection_of_glm_5_2_has_five_blocks_down() -> None:
    assert scale_shape((576, 6144)) == (5, 48)


def test_wrong_variants_break_the_bound() -> None:
    weight = uneven(384, 384)
    quantized, scale = quantize_blocks(weight)
    wrong = {
        "transposed scale": dequantize_blocks(quantized, scale.T.contiguous()),
        "divided by the scale": dequantize_blocks(quantized, 1 / scale),
        "blocks of 64 rows": dequantize_blocks(quantized, scale.repeat(2, 1), (64, 128)),
        "one scale for all": quantized.float() * scale.max(),
    }
    for name, back in wrong.items():
        assert not (back - weight).abs().le(bound(weight, BLOCK)).all(), name


def test_other_blocks_are_read(tmp_path: object) -> None:
    weight = uneven(200, 200)
    for block in ((64, 64), (1, 128), (200, 3)):
        quantized, scale = quantize_blocks(weight, block)
        assert (dequantize_blocks(quantized, scale, block) - weight).abs().le(bound(weight, block)).all()


def test_zero_denormal_and_huge_blocks_come_back_finite() -> None:
    weight = torch.zeros(128, 128 * 4)
    weight[:, 128:256] = 1e-40
    weight[:, 256:384] = torch.finfo(torch.float32).max
    weight[3, 400] = torch.finfo(torch.bfloat16).tiny
    quantized, scale = quantize_blocks(weight)
    back = dequantize_blocks(quantized, scale)
    assert torch.isfinite(scale).all() and (scale > 0).all() and torch.isfinite(back).all()
    assert torch.equal(back[:, :128], weight[:, :128])
    assert torch.equal(back[:, 256:384] / weight[:, 256:384], torch.ones(128, 128))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_fp8_cannot_hold_is_refused(number: float) -> None:
    weight = torch.ones(4, 4)
    weight[1, 2] = number
    with pytest.raises(ValueError, match="infinite or NaN"):
        quantize_blocks(weight)
