from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from tests.data.trees import pictures, thumbnails
from trust_tta.errors import ConfigError, DataError
from trust_tta.preprocessing import PRESETS, Preprocessing, find_preset


def _formula(image: NDArray[np.uint8], preprocessing: Preprocessing) -> NDArray[np.float64]:
    scaled: NDArray[np.float64] = (image / 255 - np.array(preprocessing.mean)) / np.array(preprocessing.std)
    return scaled.transpose(2, 0, 1)


@pytest.mark.parametrize("name", list(PRESETS))
@pytest.mark.parametrize("shape", [(300, 260), (224, 224), (225, 400)])
def test_presets_give_their_size(name: str, shape: tuple[int, int]) -> None:
    image = np.zeros((*shape, 3), dtype=np.uint8)
    size = PRESETS[name].size
    result = PRESETS[name]([image, image])
    assert result.shape == (2, 3, size, size)
    assert result.dtype == torch.float32
    assert result.is_contiguous()


def test_cifar32_follows_the_formula() -> None:
    images = thumbnails(5)
    result = PRESETS["cifar32"](images)
    for i in range(5):
        np.testing.assert_allclose(result[i].numpy(), _formula(images[i], PRESETS["cifar32"]), atol=1e-6)


def test_read_only_arrays_are_not_written_to() -> None:
    images = thumbnails(2)
    images.setflags(write=False)
    before = images.copy()
    PRESETS["cifar32"](images)
    assert (images == before).all()


def test_array_and_list_agree() -> None:
    images = thumbnails(6)
    for name in ("cifar32", "squash224", "pacs96"):
        assert torch.equal(PRESETS[name](images), PRESETS[name](list(images)))


def test_squash224_is_pillows_bicubic() -> None:
    images = thumbnails(3)
    expected = np.stack([np.asarray(Image.fromarray(i).resize((224, 224), Image.Resampling.BICUBIC)) for i in images])
    assert (PRESETS["squash224"].fit(images) == expected).all()


def test_imagenet_scales_the_short_side_and_cuts_the_middle() -> None:
    # a ramp from left to right keeps its slope, so the middle of the cut is the middle of the image
    image = np.tile(np.linspace(0, 255, 600).astype(np.uint8)[None, :, None], (300, 1, 3))
    fitted = PRESETS["imagenet"].fit_image(image)
    assert fitted.shape == (224, 224, 3)
    assert abs(float(fitted.mean()) - 127.5) < 1
    # 224 of the 512 columns that a short side of 256 leaves
    assert abs(float(fitted[:, -1].mean() - fitted[:, 0].mean()) - 255 * 223 / 512) < 2


def test_imagenet_c_cuts_without_resizing() -> None:
    image = np.random.default_rng(0).integers(0, 256, (225, 231, 3), dtype=np.uint8)
    assert (PRESETS["imagenet-c"].fit_image(image) == image[0:224, 4:228]).all()
    with pytest.raises(DataError, match="200x300 pixels is too small to cut 224x224"):
        PRESETS["imagenet-c"].fit_image(np.zeros((200, 300, 3), np.uint8))


def test_an_image_of_the_size_still_goes_through_a_larger_resize() -> None:
    image = thumbnails(1, side=224)[0]
    assert not (PRESETS["imagenet"].fit_image(image) == image).all()
    assert PRESETS["squash224"].fit_image(image) is image


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_squash_takes_any_shape(interpolation: str) -> None:
    preprocessing = Preprocessing(size=17, resize=None, crop=False, interpolation=interpolation)  # type: ignore[arg-type]
    images = pictures(4)
    result = preprocessing(images)
    filters = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}
    expected = np.asarray(Image.fromarray(images[2]).resize((17, 17), filters[interpolation]))
    np.testing.assert_allclose(result[2].numpy(), _formula(expected, preprocessing), atol=1e-6)


def test_no_images() -> None:
    assert PRESETS["imagenet"]([]).shape == (0, 3, 224, 224)


def test_normalize_leaves_its_input() -> None:
    images = torch.from_numpy(thumbnails(2))
    before = images.clone()
    PRESETS["cifar32"].normalize(images)
    assert torch.equal(images, before)


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="size is 0"):
        Preprocessing(size=0)
    with pytest.raises(ConfigError, match="resize is 200; it must be at least the size 224"):
        Preprocessing(resize=200)
    with pytest.raises(ConfigError, match="without a crop it must be the size 224, or None"):
        Preprocessing(resize=256, crop=False)
    with pytest.raises(ConfigError, match=r"std\.1 is 0\.0; give a value > 0"):
        Preprocessing(std=(0.2, 0.0, 0.2))
    with pytest.raises(ConfigError, match="interpolation is 'cubic'; did you mean 'bicubic'"):
        Preprocessing(interpolation="cubic")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown preprocessing 'vit'; choose one of imagenet, squash224"):
        find_preset("vit")
