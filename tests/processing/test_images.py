import sys

import pytest
import torch
from PIL import Image

from liger_models.processing.images import Normalize, check_settings, read_image, to_tensor

from .conftest import encoded, picture


def test_every_way_to_give_an_image(tmp_path):
    image = picture(7, 5)
    (tmp_path / "a.png").write_bytes(encoded(image))
    for source in (image, tmp_path / "a.png", str(tmp_path / "a.png"), encoded(image)):
        got = read_image(source)
        assert (got.mode, got.tobytes()) == ("RGB", image.tobytes())


@pytest.mark.parametrize("mode", ["L", "RGBA", "LA", "CMYK"])
def test_other_modes_become_rgb_on_white_as_in_transformers(mode):
    from transformers.image_transforms import convert_to_rgb

    image = picture(6, 4, mode)
    want = torch.from_numpy(convert_to_rgb(image, return_numpy=True))
    assert torch.equal(to_tensor(read_image(image), (4, 6), 3).permute(1, 2, 0), want)


def test_a_transparent_palette():
    image = picture(6, 4).quantize(4)
    image.info["transparency"] = 0
    again = read_image(encoded(image, "PNG"))
    palette = Image.open(__import__("io").BytesIO(encoded(image, "PNG"))).convert("RGBA")
    places = torch.tensor([pixel[3] == 0 for pixel in palette.get_flattened_data()]).view(4, 6)
    assert places.any()
    assert (to_tensor(again, (4, 6), 3)[:, places] == 255).all()


def test_what_is_no_image():
    with pytest.raises(TypeError, match="a PIL image, a path or a file's bytes, got int"):
        read_image(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="5 bytes must be a whole image file"):
        read_image(b"nonsense"[:5])
    with pytest.raises(ValueError, match="must be a whole image file"):
        read_image(encoded(picture(64, 64))[:200])
    with pytest.raises(FileNotFoundError):
        read_image("nowhere.png")


def test_without_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install 'liger_models\[vision\]'"):
        read_image(b"")


def test_normalize_is_transformers():
    from transformers.image_transforms import normalize, rescale

    pixels = to_tensor(picture(9, 8), (8, 9), 3)
    mean, std = [0.48, 0.4578275, 0.4], [0.26862954, 0.2613, 0.27]
    for settings in ({"image_mean": mean, "image_std": std}, {"image_mean": None, "rescale_factor": 0.01}):
        got = Normalize(settings, mean, std)(pixels)
        scaled = rescale(pixels.numpy(), settings.get("rescale_factor", 1 / 255))
        assert torch.equal(got, torch.from_numpy(normalize(scaled, mean, std, input_data_format="channels_first")))
    assert torch.equal(Normalize({"do_normalize": False, "do_rescale": False}, mean, std)(pixels), pixels.float())


def test_settings_that_are_not_computed():
    check_settings({"do_resize": True, "resample": None}, do_resize=True, resample=3)
    with pytest.raises(ValueError, match=r"preprocessor_config.json: resample must be 3, got 2\."):
        check_settings({"resample": 2}, resample=3)
