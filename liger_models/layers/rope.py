"""Rotary position embeddings: frequencies for all scaling types, and fp32 tables of each token's cos and sin.

Source: RoFormer (https://arxiv.org/abs/2104.09864), YaRN (https://arxiv.org/abs/2309.00071), and transformers'
``modeling_rope_utils.py`` for the frequency rules that the released checkpoints were trained with.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from liger_models.layers.layer import Layer


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Divides every frequency by ``factor``."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class DynamicScaling:
    """Dynamic NTK scaling: beyond ``max_position_embeddings``, the base grows with the length of the document."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Scaling of Llama 3.1 and later: divides low frequencies by ``factor``, keeps high frequencies, and interpolates
    in between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN: divides low frequencies by ``factor``, keeps high frequencies, and interpolates in between.

    A frequency is high if its angle makes at least ``beta_fast`` full turns over the original length, and low if its
    angle makes at most ``beta_slow`` full turns.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE: each frequency has two divisors, one for documents up to the original length and one for longer
    documents.

    Cos and sin are multiplied by ``short_mscale`` in short documents and by ``long_mscale`` in longer documents, as in
    the files of Phi-3.5-MoE. If ``short_mscale`` and ``long_mscale`` are None, cos and sin are multiplied by
    `longrope_attention_factor`.
    """

    short_factor: list[float]
    long_factor: list[float]
    original_max_position_embeddings: int
    factor: float | None = None
    attention_factor: float | None = None
    short_mscale: float | None = None
    long_mscale: float | None = None


@dataclass(frozen=True, kw_only=True)
class NtkAlphaScaling:
    """Multiplies the base by alpha^(width / (width − 2)) for ``width`` rotated dimensions, as in Hunyuan. All fields
    except ``alpha`` are ignored."""

    alpha: float
    factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None


RopeScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling | NtkAlphaScaling

ROPE_TYPES: dict[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "dynamic": DynamicScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "longrope": LongRopeScaling,
    "ntk_alpha": NtkAlphaScaling,
}
"""Maps ``rope_type`` in config.json to a dataclass. The type ``default`` is missing, because None stands for no
scaling."""


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return ``0.1 · mscale · ln(factor) + 1``, or 1 for factors up to 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_attention_factor(scaling: YarnScaling) -> float:
    """Return the factor for cos and sin that compensates YaRN's effect on the entropy of attention."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    # If `mscale` and `mscale_all_dim` are both given, the result is the ratio of their values of `yarn_mscale`.
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor, 1.0)


def longrope_attention_factor(scaling: LongRopeScaling, max_position_embeddings: int) -> float:
    """Return the factor for cos and sin, which is the same for short and for long documents."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    original = scaling.original_max_position_embeddings
    growth = max_position_embeddings / original if scaling.factor is None else scaling.factor
    return math.sqrt(1 + math.log(growth) / math.log(original)) if growth > 1 else 1.0


def _exponent(width: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.arange(0, width, 2, dtype=torch.int64, device=device).float() / width


def _base_frequencies(width: int, theta: float | Tensor) -> Tensor:
    return 1.0 / (theta ** _exponent(width, theta.device if isinstance(theta, Tensor) else "cpu"))


def _longrope_frequencies(width: int, theta: float, divisors: list[float]) -> Tensor:
    if len(divisors) != width // 2:
        raise ValueError(
            f"RotaryEmbedding: short_factor and long_factor must have one entry for each of the {width // 2} "
            f"frequencies, got {len(divisors)}. Check head_dim and partial_rotary_factor."
        )
    return 1.0 / (torch.tensor(divisors, dtype=torch.float32, device="cpu") * theta ** _exponent(width))


def _llama3_frequencies(base: Tensor, scaling: Llama3Scaling) -> Tensor:
    # Divide frequencies with wavelengths above original / low, keep frequencies with wavelengths below original / high,
    # and interpolate between both results for all other frequencies.
    wavelength = 2 * math.pi / base
    original = scaling.original_max_position_embeddings
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * base / scaling.factor + smooth * base
    scaled = torch.where(wavelength > original / low, base / scaling.factor, blended)
    return torch.where(wavelength < original / high, base, scaled)


def _yarn_frequencies(base: Tensor, width: int, theta: float, scaling: YarnScaling) -> Tensor:
    def pair_of(rotations: float) -> float:
        """Return the index of the pair of dimensions that makes ``rotations`` full turns over the original length. The
        index need not be an integer."""
        turns = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return width * math.log(turns) / (2 * math.log(theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The ramp is 0 for pairs up to `first`, and 1 for pairs from `last` on. The length of the ramp must not be 0.
    first, last = max(first, 0), min(last, width - 1)
    if first == last:
        last += 0.001
    ramp = ((torch.arange(width // 2, dtype=torch.float32, device="cpu") - first) / (last - first)).clamp(0, 1)
    kept = 1 - ramp  # a separate step, so that the rounding is the same as in the training code of the checkpoints
    return base / scaling.factor * (1 - kept) + base * kept


def switch_columns(rotary: Iterable[Layer], positions: Tensor) -> list[int]:
    """Return the columns of the batch (indices along S) at which the frequencies of at least one row change, because
    the row becomes longer than the original length (`LongRopeScaling`).

    Keys that were cached before such a column were rotated with the old frequencies.

    Args:
        rotary: the rotary embeddings of a model.
        positions: [1 or B, S] or [3, 1 or B, S] int64, rising along S.
    """
    highest = positions.flatten(0, -3).amax(0) if positions.dim() > 2 else positions
    lengths = {layer.switch_length for layer in rotary if layer.switch_length is not None}
    return sorted({column for length in lengths for column in (highest < length).sum(-1).tolist()})


class RotaryEmbedding(Layer):
    """Computes cos and sin of the rotation angles at every token's position, in fp32.

    The frequencies are computed in fp32 from the config. They are neither parameters nor buffers, so casts,
    initialization on the meta device and checkpoints do not change them. If the module moves to another device, the
    frequencies also move.

    With `DynamicScaling` and `LongRopeScaling`, the frequencies of each document depend only on the document's own
    length. If ``by_document`` is False, all frequencies depend on the longest row of the batch, as in transformers.

    Args:
        width: number of rotated dimensions, which must be even: the head dimension, or less for partial rotation.
        theta: base of the frequencies.
        scaling: how the frequencies are scaled for longer contexts; None for no scaling.
        max_position_embeddings: length beyond which `DynamicScaling` applies, or target length of `LongRopeScaling`.

    Raises:
        ValueError: the width is odd, or the number of divisors is not half the width.
    """

    by_document = True
    """Whether frequencies depend on the length of each document, and not on the longest row of the batch."""

    def __init__(
        self,
        width: int,
        theta: float = 10000.0,
        scaling: RopeScaling | None = None,
        max_position_embeddings: int = 2048,
    ) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(
                f"RotaryEmbedding: width must be even, got {width}. Check head_dim and partial_rotary_factor."
            )

        # Compute the frequencies. With dynamic scaling, the forward computes the frequencies of documents that are
        # longer than `max_position_embeddings`.
        self.width, self.theta, self.scaling = width, theta, scaling
        self.max_position_embeddings = max_position_embeddings
        self.attention_factor = 1.0
        self.long_attention_factor: float | None = None
        """The attention factor beyond `switch_length`; None if it equals ``attention_factor``."""
        self.long_inv_freq: Tensor | None = None
        base = _base_frequencies(width, theta)
        match scaling:
            case LinearScaling():
                base = base / scaling.factor
            case Llama3Scaling():
                base = _llama3_frequencies(base, scaling)
            case YarnScaling():
                base = _yarn_frequencies(base, width, theta, scaling)
                self.attention_factor = yarn_attention_factor(scaling)
            case LongRopeScaling():
                base = _longrope_frequencies(width, theta, scaling.short_factor)
                self.long_inv_freq = _longrope_frequencies(width, theta, scaling.long_factor)
                common = longrope_attention_factor(scaling, max_position_embeddings)
                self.attention_factor = common if scaling.short_mscale is None else scaling.short_mscale
                long = common if scaling.long_mscale is None else scaling.long_mscale
                self.long_attention_factor = None if long == self.attention_factor else long
                self.switch_length = scaling.original_max_position_embeddings
            case NtkAlphaScaling():
                base = _base_frequencies(width, theta * scaling.alpha ** (width / (width - 2)))
        # The frequencies are not a buffer, because a buffer on the meta device has no values, and checkpoints do not
        # contain the frequencies.
        self.inv_freq = base
        self._move(torch.get_default_device())

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> "RotaryEmbedding":
        super()._apply(fn, recurse)
        self._move(fn(torch.empty(0, device=self.inv_freq.device)).device)
        return self

    def _move(self, device: torch.device) -> None:
        if device.type != "meta":  # loading would not restore the frequencies, because they are not weights
            self.inv_freq = self.inv_freq.to(device)
            self.long_inv_freq = None if self.long_inv_freq is None else self.long_inv_freq.to(device)

    @property
    def needs_lengths(self) -> bool:
        """Whether the frequencies depend on the lengths of documents."""
        return isinstance(self.scaling, DynamicScaling | LongRopeScaling)

    def frequencies(self, position_ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the frequencies for these positions, in fp32, on the device of the positions.

        Args:
            position_ids: [..., T] int64.
            lengths: [B, T] int64, the length of each token's document, including cached tokens and all tokens in this
                batch. None if each row is one document.

        Returns:
            [width / 2], or [B, 1 or T, width / 2] if the frequencies depend on the lengths.
        """
        inv_freq = self.inv_freq.to(position_ids.device)
        if not self.needs_lengths or position_ids.numel() == 0:
            return inv_freq
        lengths = self._lengths(position_ids, lengths)
        if self.switch_length is not None and self.long_inv_freq is not None:
            return torch.where(lengths > self.switch_length, self.long_inv_freq.to(position_ids.device), inv_freq)
        assert isinstance(self.scaling, DynamicScaling)
        factor, limit = self.scaling.factor, self.max_position_embeddings
        growth = factor * lengths.clamp_min(limit).float() / limit - (factor - 1)
        growth = growth ** (self.width / (self.width - 2))
        return torch.where(lengths > limit, _base_frequencies(self.width, self.theta * growth), inv_freq)

    def _lengths(self, position_ids: Tensor, lengths: Tensor | None) -> Tensor:
        """Return the lengths that determine the frequencies: one length [1] for all tokens, or the lengths of rows or
        documents, [B, 1 or T, 1]."""
        if not self.by_document:
            lengths = position_ids.max() + 1
        elif lengths is None:
            lengths = position_ids.flatten(0, -3).amax(0) if position_ids.dim() > 2 else position_ids  # [B, T]
            lengths = lengths.amax(-1, keepdim=True) + 1
        return lengths[..., None]

    def tables(self, angles: Tensor, position_ids: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the angles, multiplied by the attention factor, which may depend on ``lengths``."""
        factor: float | Tensor = self.attention_factor
        if self.long_attention_factor is not None and self.switch_length is not None and position_ids.numel():
            is_long = self._lengths(position_ids, lengths) > self.switch_length
            long_factor = angles.new_full((), self.long_attention_factor)
            factor = torch.where(is_long, long_factor, self.attention_factor)
        return angles.cos() * factor, angles.sin() * factor

    def forward(self, position_ids: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [B, T, width / 2] fp32.

        Args:
            position_ids: [B, T] int64.
            lengths: as in `frequencies`.
        """
        with torch.autocast(position_ids.device.type, enabled=False):
            angles = position_ids[..., None].float() * self.frequencies(position_ids, lengths)
            return self.tables(angles, position_ids, lengths)


class ProportionalRotaryEmbedding(RotaryEmbedding):
    """`RotaryEmbedding` that rotates only the pairs of dimensions with the highest frequencies.

    Args:
        width: head dimension, even.
        theta: base of the frequencies, which are computed for the whole width.
        share: fraction of the pairs that rotate. All other pairs have frequency 0.
    """

    def __init__(self, width: int, theta: float, share: float) -> None:
        super().__init__(width, theta)
        self.inv_freq[int(share * width // 2) :] = 0.0


class MultimodalRotaryEmbedding(RotaryEmbedding):
    """Computes cos and sin of the rotation angles at positions in time, height and width (M-RoPE). Each frequency
    applies to one of these three kinds of positions.

    Args:
        width, theta, scaling, max_position_embeddings: as in `RotaryEmbedding`.
        sections: the numbers of frequencies for time, for height and for width.
        interleaved: whether consecutive frequencies alternate between time, height and width. Once height or width has
            all of its frequencies, its places go to time. If False, the frequencies are in three contiguous sections.

    Raises:
        ValueError: the number of sections is not 3, or the sections are not interleaved and do not add up to half the
            width.

    Source: https://arxiv.org/abs/2409.12191, https://arxiv.org/abs/2511.21631.
    """

    def __init__(
        self,
        width: int,
        theta: float,
        scaling: RopeScaling | None,
        max_position_embeddings: int,
        *,
        sections: list[int],
        interleaved: bool = False,
    ) -> None:
        super().__init__(width, theta, scaling, max_position_embeddings)
        if len(sections) != 3 or (sum(sections) != width // 2 and not interleaved):
            raise ValueError(
                f"MultimodalRotaryEmbedding: mrope_section must be three numbers that add up to {width // 2}, half the "
                f"head dimension, got {sections}. Check config.json."
            )
        if interleaved:
            axes = [i % 3 if i < 3 * sections[i % 3] else 0 for i in range(width // 2)]
        else:
            axes = [axis for axis, count in enumerate(sections) for _ in range(count)]
        self.axes = torch.tensor(axes, device=self.inv_freq.device)
        """For each frequency, the kind of position that it applies to: 0 for time, 1 for height, 2 for width."""

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> "RotaryEmbedding":
        super()._apply(fn, recurse)
        self.axes = self.axes.to(self.inv_freq.device)
        return self

    def forward(self, position_ids: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [B, T, width / 2] fp32.

        Args:
            position_ids: [3, B, T] int64, or [B, T] for text.
            lengths: as in `frequencies`.
        """
        if position_ids.dim() == 2:
            return super().forward(position_ids, lengths)
        with torch.autocast(position_ids.device.type, enabled=False):
            positions = position_ids.movedim(0, -1)[..., self.axes.to(position_ids.device)]  # [B, T, width / 2]
            angles = positions.float() * self.frequencies(position_ids, lengths)
            return self.tables(angles, position_ids, lengths)


class AxialRotaryEmbedding(RotaryEmbedding):
    """Computes cos and sin of the rotation angles for the rows and columns of patches. The first half of cos and sin
    depends on the row, and the second half on the column.

    Args:
        width: head dimension, a multiple of 4.
        theta: base of the frequencies.
    """

    def __init__(self, width: int, theta: float = 10000.0) -> None:
        super().__init__(width // 2, theta)

    def forward(self, position_ids: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each [B, N, width / 2] fp32; ``position_ids`` [2, B, N] int64 holds rows and columns."""
        cos, sin = super().forward(position_ids)  # [2, B, N, width / 4]
        return cos.movedim(0, -2).flatten(-2), sin.movedim(0, -2).flatten(-2)
