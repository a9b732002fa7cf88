"""Features of one image: known values, invariances, and that no image changes another's."""

import math

import numpy as np
import pytest
import torch

from fedpriv.loss.features import orientation_histograms, pixel_features, scale_to_norm

IMAGES = np.random.default_rng(0).integers(0, 256, (30, 28, 28)).astype(np.uint8)


def histogram(image: np.ndarray) -> torch.Tensor:
    """(8, h/4, w/4)."""
    height, width = image.shape
    return orientation_histograms(image[None], torch.float64).view(8, height // 4, width // 4)


def test_an_upright_edge_counts_in_one_direction_of_its_cells() -> None:
    image = np.zeros((12, 12), dtype=np.uint8)
    image[:, 6:] = 255
    edges = histogram(image)
    # Half the step from 0 to 255 in columns 5 and 6: 2 of a cell's 4 columns, and 0.5 each.
    torch.testing.assert_close(edges[0, 1, 1], torch.tensor(0.25, dtype=torch.float64))
    assert float(edges[1:, 1, 1].abs().sum()) == 0.0
    assert float(edges[:, 1, 0].abs().sum()) == 0.0


def test_a_quarter_turn_of_the_image_turns_the_directions() -> None:
    image = IMAGES[1]
    turned = histogram(np.rot90(image).copy())  # counterclockwise: to the right becomes up, against the rows
    expected = torch.rot90(histogram(image), dims=(1, 2)).roll(-2, dims=0)
    torch.testing.assert_close(turned, expected)


def test_all_of_an_edges_length_is_counted_and_no_feature_is_above_its_bound() -> None:
    values = orientation_histograms(IMAGES, torch.float64)
    assert values.shape == (30, 392)
    assert float(values.min()) >= 0.0
    assert float(values.max()) <= math.sqrt(0.5)
    gray = np.pad(IMAGES / 255.0, ((0, 0), (1, 1), (1, 1)))
    length = np.hypot(gray[:, 1:-1, 2:] - gray[:, 1:-1, :-2], gray[:, 2:, 1:-1] - gray[:, :-2, 1:-1]) / 2.0
    np.testing.assert_allclose(values.sum(1).numpy(), length.sum((1, 2)) / 16.0)


@pytest.mark.parametrize("of", [pixel_features, orientation_histograms])
def test_an_images_features_do_not_depend_on_the_others(of) -> None:  # type: ignore[no-untyped-def]
    together = of(IMAGES, torch.float64)
    for index in (0, 7, 29):
        torch.testing.assert_close(of(IMAGES[index : index + 1], torch.float64)[0], together[index])


def test_scaled_to_at_most_a_norm_or_exactly() -> None:
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.3, 0.4]], dtype=torch.float64)
    at_most = torch.tensor([[0.0, 0.0], [1.2, 1.6], [0.3, 0.4]], dtype=torch.float64)
    exactly = torch.tensor([[0.0, 0.0], [1.2, 1.6], [1.2, 1.6]], dtype=torch.float64)
    torch.testing.assert_close(scale_to_norm(rows, 2.0, exactly=False), at_most)
    torch.testing.assert_close(scale_to_norm(rows, 2.0, exactly=True), exactly)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [3, 39, 1030])
def test_a_glance_changes_no_bit_of_scaled_features(dtype: torch.dtype, width: int) -> None:
    """Guarantee of `scaled`: rows within a few roundings of the norm, tiny and hostile ones, each by itself."""
    drawn = torch.randn(600, width, dtype=dtype, generator=torch.Generator().manual_seed(width))
    lengths = 1.0 + torch.arange(-300, 300, dtype=dtype).view(-1, 1) * torch.finfo(dtype).eps / 2.0
    near = drawn / torch.linalg.vector_norm(drawn, dim=1, keepdim=True) * lengths
    ends = torch.tensor([0.0, -0.0, 1e-45, 1e-30, 1e38, math.inf, -math.inf, math.nan], dtype=dtype).view(-1, 1)
    rows = torch.cat([near, drawn * 0.01, ends.expand(-1, width)])
    found, tiny = scale_to_norm(rows, 1.0, exactly=False), torch.finfo(dtype).tiny
    for row, values in zip(rows, found, strict=True):
        alone = row.clone().unsqueeze(0)
        length = torch.linalg.vector_norm(alone, dim=1, keepdim=True)
        expected = alone * (1.0 / length.clamp(min=tiny)).clamp(max=1.0)
        assert values.numpy().tobytes() == expected.numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("norm", [1.0, 5.0, 1e6])
def test_a_row_of_zeros_stays_zero_at_any_norm(norm: float, dtype: torch.dtype) -> None:
    """It became NaN for norms above 4, where the norm over the smallest number is infinite."""
    rows = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=dtype)
    expected = torch.tensor([[0.0, 0.0], [0.6 * norm, 0.8 * norm]], dtype=dtype)
    torch.testing.assert_close(scale_to_norm(rows, norm, exactly=True), expected)
