import base64
import sys
import zlib
from io import BytesIO
from urllib.parse import quote

import pytest
import torch
from einops import rearrange
from PIL import Image

from liger_models.base.images import (
    PORTION,
    Normalize,
    check_settings,
    cut_patches,
    cut_tiles,
    image_size,
    join,
    locate_image,
    one_list,
    open_image,
    read_image,
    settings_of,
    to_rows,
    to_tensor,
)
from liger_models.base.processor import image_parts

from ..oracle_version import needs_newest
from .conftest import encoded, picture


def test_every_way_to_give_an_image(tmp_path):
    image = picture(7, 5)
    path, content = tmp_path / "a b.png", encoded(image)
    path.write_bytes(content)
    data = base64.b64encode(content).decode()
    for source in (
        image, path, str(path), content, bytearray(content), path.as_uri(), f"FILE://localhost{quote(str(path))}",
        f"data:image/png;base64,{data}", f"data:;base64,{data[:9]}\n{quote(data[9:])}", f"data:,{quote(content)}",
        {"bytes": content, "path": "elsewhere.png"}, {"bytes": None, "path": str(path)}, {"url": path.as_uri()},
    ):  # fmt: skip
        got = read_image(source)
        assert (got.mode, got.tobytes()) == ("RGB", image.tobytes())
        opened = open_image(source)
        assert (opened.size, opened.tobytes()) == (image.size, image.tobytes())
    assert open_image(encoded(picture(7, 5, "RGBA"))).mode == "RGBA"
    assert locate_image(path.as_uri()) == path
    assert locate_image({"bytes": content}) == content


@needs_newest("conversion on white")
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


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_file_is_turned_upright_as_in_transformers(tmp_path, orientation):
    """Photographs of telephones lie on their side in the file."""
    from transformers.image_utils import load_image

    exif = Image.Exif()
    exif[0x0112] = orientation
    picture(8, 5).save(tmp_path / "a.jpg", exif=exif)
    want = load_image(str(tmp_path / "a.jpg"))
    for source in (tmp_path / "a.jpg", (tmp_path / "a.jpg").read_bytes()):
        got = read_image(source)
        assert (got.size, got.tobytes()) == (want.size, want.tobytes())
    opened = Image.open(tmp_path / "a.jpg")  # not a file any more: its pixels count
    assert read_image(opened).tobytes() == opened.tobytes()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_sizes_without_decoding(tmp_path, monkeypatch, kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "a"
    picture(8, 5).save(path, kind, exif=exif)
    want = open_image(path).size
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("decoded"))
    assert image_size(path) == image_size(path.read_bytes()) == want


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 5\n%%EndComments\n%%EOF\n"


@pytest.mark.parametrize("wrapped", [False, True], ids=["EPS", "EPS in IPTC"])
def test_no_image_starts_a_program(tmp_path, monkeypatch, wrapped):
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("Ghostscript"))

    def field(record, number, data):
        return bytes([0x1C, record, number]) + len(data).to_bytes(2, "big") + data

    fields = [(3, 60, b"\x01\x00"), (3, 65, b"\x01"), (3, 20, b"\0\x08"), (3, 30, b"\0\x05"), (3, 120, b"\x01")]
    fields += [(8, 10, EPS)]
    content = b"".join(field(*part) for part in fields) if wrapped else EPS
    (tmp_path / "a.png").write_bytes(content)
    for source in (content, tmp_path / "a.png"):
        for read in (open_image, read_image, image_size):
            with pytest.raises(ValueError, match="must be a whole image file, got: none in the formats PNG, JPEG"):
                read(source)


XMP = '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="{}"/></x:xmpmeta>'


def png_with(name, content):
    """A PNG of 8 x 5 with one more chunk, after its pixels."""
    chunk = name + content
    added = len(content).to_bytes(4, "big") + chunk + zlib.crc32(chunk).to_bytes(4, "big")
    png = encoded(picture(8, 5), "PNG")
    return png[:-12] + added + png[-12:]


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_sizes_of_images_that_turn_late(orientation, monkeypatch):
    exif = Image.Exif()
    exif[0x0112] = orientation
    raw = exif.tobytes()
    profile = f"\nexif\n{len(raw):8}\n{raw.hex()}\n".encode()
    tiff = BytesIO()
    picture(8, 5).save(tiff, "TIFF", tiffinfo={700: XMP.format(orientation).encode()})
    both = BytesIO()
    picture(8, 5).save(both, "TIFF", tiffinfo={700: XMP.format(6).encode(), 274: orientation})
    contents = [
        png_with(b"eXIf", raw.removeprefix(b"Exif\0\0")),
        png_with(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP.format(orientation).encode()),
        png_with(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(profile)),
        png_with(b"tEXt", b"Raw profile type exif\0" + profile),
        tiff.getvalue(),
        both.getvalue(),
    ]
    for content in contents:
        assert image_size(content) == open_image(content).size == ((5, 8) if orientation > 4 else (8, 5))
    with monkeypatch.context() as patch:
        patch.setattr("PIL.ImageFile.ImageFile.load", lambda *_: pytest.fail("decoded"))
        assert image_size(png_with(b"tEXt", b"date:create\0today")) == (8, 5)


def test_sizes_of_what_is_no_image(tmp_path, monkeypatch):
    assert image_size(picture(7, 5)) == image_size(encoded(picture(7, 5))) == (7, 5)
    assert image_size(encoded(picture(64, 64))[:200]) == (64, 64)  # only the header is read
    with pytest.raises(ValueError, match=r"at most 4096 characters, got 9000: iVBO(rw0K){9}\.\.\. If it is base64"):
        read_image("iVBO" + "rw0K" * 2249)
    with pytest.raises(ValueError, match="5 bytes must be a whole image file"):
        image_size(b"nonsense"[:5])
    with pytest.raises(FileNotFoundError):
        image_size(tmp_path / "nowhere.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 30)
    with pytest.raises(ValueError, match=r"must have (fewer|at most 30) pixels"):
        image_size(encoded(picture(7, 5)))


@pytest.mark.parametrize("mode", ["I;16", "I;16B"])
def test_sixteen_bits_become_eight(tmp_path, mode):
    values = [0, 1, 255, 256, 257, 32768, 65407, 65535]
    data = b"".join(value.to_bytes(2, "big" if mode == "I;16B" else "little") for value in values)
    image = Image.frombytes(mode, (4, 2), data)
    want = [round(value / 257) for value in values]
    image.save(tmp_path / "a.png")
    image.save(tmp_path / "a.tiff")
    for source in (image, tmp_path / "a.png", tmp_path / "a.tiff"):
        got = read_image(source)
        assert (got.mode, to_tensor(got, (2, 4), 3)[1].flatten().tolist()) == ("RGB", want)


@pytest.mark.parametrize("mode", ["F", "I"])
def test_pixels_of_unknown_range_are_refused(mode):
    with pytest.raises(ValueError, match=f"must have 8 or 16 bits per channel, got mode {mode}, .*convert\\('L'\\)"):
        read_image(Image.new(mode, (3, 3), 1))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("most", [20, 30])
def test_too_many_pixels_are_refused_before_they_are_decoded(monkeypatch, most):
    """Beyond twice the limit Pillow raises itself, below it only warns."""
    image = picture(9, 5)
    content = encoded(image)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)
    monkeypatch.setattr(Image.Image, "convert", lambda *_: pytest.fail("decoded"))
    for source in (content, image):
        with pytest.raises(ValueError, match=r"must have (fewer|at most \d\d) pixels, got.*raise PIL.Image.MAX_IMAGE"):
            read_image(source)
    monkeypatch.undo()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert read_image(content).size == (9, 5)


def test_what_is_no_image():
    with pytest.raises(TypeError, match="a PIL image, a path, a file:// URL, a data URI or a file's bytes, got int"):
        read_image(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must have the key bytes, path, url or base64, got \['bytes', 'name'\]"):
        read_image({"bytes": None, "name": "a.png"})
    for broken in ("data:image/png;base64,iV*O", "data:image/png;base64", "data:image/png;base64,i"):
        with pytest.raises(ValueError, match=r"a data URI must be .*, got data:image/png;base64.*Encode it again\."):
            read_image(broken)
    with pytest.raises(ValueError, match="5 bytes must be a whole image file"):
        read_image(b"nonsense"[:5])
    with pytest.raises(ValueError, match="must be a whole image file"):
        read_image(encoded(picture(64, 64))[:200])
    with pytest.raises(FileNotFoundError):
        read_image("nowhere.png")
    with pytest.raises(ValueError, match="an image must have pixels, got 0 x 5"):
        read_image(picture(9, 5).crop((3, 0, 3, 5)))
    for address in ("https://example.com/a.png", "HTTPS://example.com/a.png", "file://server/a.png"):
        with pytest.raises(ValueError, match=f"got the URL {address}. Download it and pass its bytes"):
            read_image(address)


def test_without_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install 'liger_models\[vision\]'"):
        read_image(b"")


def test_normalize_is_transformers():
    from transformers.image_transforms import normalize, rescale

    pixels = to_tensor(picture(9, 8), (8, 9), 3)
    mean, std = [0.48, 0.4578275, 0.4], [0.26862954, 0.2613, 0.27]
    for settings in (
        {"image_mean": mean, "image_std": std},
        {"image_mean": None, "rescale_factor": 0.01},
        {"image_mean": 0.4, "image_std": 0.3},
        {"rescale_factor": 0.0039},  # the quotient by 1 / 0.0039 in fp32 differs
    ):
        got = Normalize(settings, mean, std)(pixels)
        scaled = rescale(pixels.numpy(), settings.get("rescale_factor", 1 / 255))
        given = settings.get("image_mean") or mean, settings.get("image_std", std)
        assert torch.equal(got, torch.from_numpy(normalize(scaled, *given, input_data_format="channels_first")))
    for off in (False, None):
        settings = {"do_normalize": off, "do_rescale": off}
        assert torch.equal(Normalize(settings, mean, std)(pixels), pixels.float())


def test_every_level_is_normalized_alike_in_every_layout():
    levels = torch.arange(256, dtype=torch.float64)
    mean, std = torch.tensor([0.48, 0.45, 0.4]).view(3, 1), torch.tensor([0.26, 0.27, 0.28]).view(3, 1)
    pixels = torch.randint(0, 256, (3, 300, 500), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    for factor in (1 / 255, 0.0039):
        settings = {"image_mean": mean.flatten().tolist(), "image_std": std.flatten().tolist()}
        normalize = Normalize(settings | {"rescale_factor": factor}, [0.0], [1.0])
        table = ((levels * factor).float() - mean) / std  # [3, 256], with the roundings of transformers
        want = torch.stack([row[plane.long()] for row, plane in zip(table, pixels, strict=True)])
        # Whole images, tiles without a copy, and tensors of several portions, of which a part is left over.
        assert pixels.numel() > 2 * PORTION
        assert torch.equal(normalize(pixels), want)
        tiles = cut_tiles(pixels, 3, 5)
        assert all(tile.untyped_storage().data_ptr() == pixels.untyped_storage().data_ptr() for tile in tiles)
        assert torch.equal(normalize.stack(tiles), rearrange(want, "c (r h) (k w) -> (r k) c h w", r=3, k=5))
        # Patches, also with adjacent channels, and in two places at once.
        for side, merge in ((4, 5), (10, 2), (25, 2), (20, 1)):
            order = {"m": merge, "k": merge, "y": side, "x": side}
            cut, out = cut_patches(pixels, side, side, merge), torch.full((150000 // side**2, 3, 3, side**2), 7.0)
            normalize.write(cut, out[:, :, 0], out[:, :, 2])
            patches = rearrange(want, "c (h m y) (w k x) -> (h w m k) c (y x)", **order)
            assert torch.equal(out, torch.stack([patches, torch.full_like(patches, 7.0), patches], 2))
            rows = rearrange(pixels, "c h w -> h (w c)")
            cut, out = cut_patches(rows[None], side, 3 * side, merge)[:, 0], torch.empty(len(out), 3 * side**2)
            normalize.write(cut, out)
            assert torch.equal(out, rearrange(want, "c (h m y) (w k x) -> (h w m k) (y x c)", **order))


def test_joined_tensors_are_padded_and_a_single_one_is_not_copied():
    first, second = torch.ones(2, 3, 4), torch.full((1, 5, 2), 2.0)
    want = torch.zeros(3, 5, 4)
    want[:2, :3], want[2, :, :2] = 1.0, 2.0
    assert torch.equal(join([first, second]), want)
    assert torch.equal(join([torch.tensor([1]), torch.tensor([2, 3])]), torch.tensor([1, 2, 3]))
    assert join([first]) is first


def test_rows_have_the_pixels_of_planes():
    image = picture(9, 8)
    assert torch.equal(to_rows(image, (6, 4), 3), rearrange(to_tensor(image, (6, 4), 3), "c h w -> h (w c)"))


def test_images_in_rgb_are_not_copied(monkeypatch):
    image, content = picture(7, 5), encoded(picture(7, 5))
    assert read_image(image) is image
    copies = []
    for method in ("copy", "convert"):
        monkeypatch.setattr(Image.Image, method, lambda *_, method=method: copies.append(method))
    assert read_image(content).tobytes() == image.tobytes()
    assert not copies


def test_settings_that_are_not_computed():
    check_settings({"do_resize": True, "resample": None}, do_resize=True, resample=3)
    with pytest.raises(ValueError, match=r"preprocessor_config.json: resample must be 3, got 2\."):
        check_settings({"resample": 2}, resample=3)
    with pytest.raises(ValueError, match=r"preprocessor_config.json: do_resize must be True, got None\."):
        check_settings({"do_resize": None}, do_resize=True)


def test_settings_of_transformers_5_come_first():
    """One file with a part for each; older versions have a file for each."""
    assets = {"preprocessor_config.json": b'{"a": 1}', "video_preprocessor_config.json": b'{"a": 2}'}
    parts = ("image_processor", "video_processor")
    assert [settings_of(assets, part) for part in parts] == [{"a": 1}, {"a": 2}]
    assets["processor_config.json"] = b'{"processor_class": "Gemma3Processor"}'
    assert [settings_of(assets, part) for part in parts] == [{"a": 1}, {"a": 2}]
    assets["processor_config.json"] = b'{"image_processor": {"a": 3}, "video_processor": {"a": 4}}'
    assert [settings_of(assets, part) for part in parts] == [{"a": 3}, {"a": 4}]
    assert settings_of({}, "image_processor") == {}
    for content, message in ((b"{", "must be JSON, got Expecting"), (b"[]", "must be a JSON object, got list")):
        with pytest.raises(ValueError, match=f"^preprocessor_config.json: {message}"):
            settings_of({"preprocessor_config.json": content}, "image_processor")


def test_images_in_one_list_or_one_for_each_text():
    a, b = picture(2, 2), picture(3, 3)
    texts = ["<i> and <i>", "none", "<i>"]
    for images in ([a, b, a], [[a, b], [], [a]], ((a, b), (), (a,))):
        assert one_list("P", "<i>", texts, images) == [a, b, a]
    assert one_list("P", "<i>", ["<i>"], a) == [a]
    assert one_list("P", "<i>", ["none"], None) == []
    with pytest.raises(ValueError, match=r"P: the list of images for each text .* <i>, \[2, 0, 1\], got \[1, 0, 2\]"):
        one_list("P", "<i>", texts, [[a], [], [b, a]])
    with pytest.raises(ValueError, match=r"got \[None, 1\]"):
        one_list("P", "<i>", ["<i>", "<i>"], [a, [b]])
    with pytest.raises(ValueError, match="one <i> for each of the 2 images, got 3"):
        one_list("P", "<i>", texts, [a, b])


def test_parts_of_messages():
    of = lambda *parts, **options: image_parts([{"role": "user", "content": list(parts)}], **options)
    clip = {"type": "video", "video": [1, 2], "fps": 2.0}
    parts = [{"type": "text", "text": "a"}, {"type": "image", "path": "b.png"}, {"image": "c.png"}, {"text": "d"}]
    assert [(kind, what) for kind, what, _ in of(*parts)] == [("image", "b.png"), ("image", "c.png")]
    assert of(clip, videos=True) == [("video", [1, 2], clip)]
    assert of({"type": "text", "text": "a", "image": None}) == []
    arrow = {"type": "image", "text": None, "image": "c.png"}
    assert of(arrow) == [("image", "c.png", arrow)]
    with pytest.raises(ValueError, match="must not have a size of its own, got max_pixels, min_pixels"):
        of({"type": "image", "image": "b.png", "min_pixels": 4, "max_pixels": 8})
    assert image_parts([{"role": "assistant", "content": None}, {"role": "assistant"}]) == []
    with pytest.raises(ValueError, match="content must be a text or a list of parts, got dict"):
        image_parts([{"role": "user", "content": {"type": "image", "image": "b.png"}}])
    with pytest.raises(ValueError, match="must be of type text or image, got 'video'"):
        of(clip)
    with pytest.raises(ValueError, match="must be of type text or image or video, got 'image_url'"):
        of({"type": "image_url", "image_url": {"url": "b.png"}}, videos=True)
    with pytest.raises(ValueError, match="must be of type text or image, got 'words'"):
        of("words")
    with pytest.raises(ValueError, match=r"must have the key image or path or url, got \['type'\]"):
        of({"type": "image"})


@pytest.mark.parametrize(
    "settings",
    [
        {"image_std": 0},
        {"image_std": [0.5, 0.5, -1]},
        {"image_mean": [float("nan")] * 3},
        {"image_mean": [0.5, 0.5]},
        {"image_mean": "0.5"},
        {"rescale_factor": float("inf")},
        {"rescale_factor": 0},
    ],
)
def test_numbers_that_make_no_pixels_are_refused(settings):
    (key,) = settings
    with pytest.raises(ValueError, match=rf"preprocessor_config.json: {key} must be .*channels, got "):
        Normalize(settings, [0.5] * 3, [0.5] * 3)
