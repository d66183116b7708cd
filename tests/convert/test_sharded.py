"""Parts of parameters from the rows of a checkpoint that they are made of."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from liger_models.arch import get_arch, list_archs
from liger_models.convert import format_of
from liger_models.convert.sharded import MAX_RUNS, Part, plan_rows, read_part, untouched
from liger_models.convert.weight_map import Cat, Expression, Name, Rearrange, Split, Stack

from ..arch.families import of_each_kind, tiny


def maps(arch: str) -> list[tuple[Any, dict[str, Tensor]]]:
    """Every layout of every tiny configuration of an architecture, and its parameters' shapes."""
    from transformers import AutoConfig

    from liger_models.convert.config_map import read_config

    made = []
    for options in tiny(arch).values():
        cls = get_arch(arch)
        config = read_config(cls.config_class, AutoConfig.for_model(arch, **options).to_dict())
        with torch.device("meta"):
            parameters = dict(cls(config).named_parameters())
        made += [(layout, parameters) for layout in format_of(get_arch(arch)).weight_maps(config)]
    return made


class Source:
    """A checkpoint in memory that counts what is read."""

    def __init__(self, shapes: dict[str, torch.Size]) -> None:
        self.tensors, start = {}, 0
        for name, shape in shapes.items():
            self.tensors[name] = torch.arange(start, start + shape.numel()).view(shape)
            start += shape.numel()
        self.read_elements = 0

    def read(self, name: str, first: int, last: int) -> Tensor:
        rows = self.tensors[name][first:last]
        self.read_elements += rows.numel()
        return rows


def never() -> Tensor:
    raise AssertionError("the whole parameter was read")


@pytest.mark.cases(8)
@pytest.mark.slow
@pytest.mark.parametrize("arch", of_each_kind(list_archs()))
def test_parts_of_every_parameter(arch: str) -> None:
    """Each rank's rows are those of the whole parameter, and little more is read than they have elements."""
    seen = set()
    for weights, parameters in maps(arch):
        for name, parameter in parameters.items():
            expression: Expression = weights.entries[name]
            unpacked = expression.unpack(torch.empty(parameter.shape, device="meta"))
            shapes = {key: tensor.shape for key, tensor in unpacked.items()}
            alike = re.sub(r"\d+", "", name), type(expression), parameter.shape, *shapes.values()
            if alike in seen:  # in another layer or variant
                continue
            seen.add(alike)
            source = Source(shapes)
            whole = expression.pack(source.tensors)
            for ranks in (1, 2, 3, 7):
                step = -(-len(whole) // ranks)
                for rank in range(ranks):
                    first, last = min(rank * step, len(whole)), min((rank + 1) * step, len(whole))
                    source.read_elements = 0
                    part = Part((first, *[0] * (whole.dim() - 1)), (last - first, *whole.shape[1:]))
                    turned = name == "visual.projection.weight"  # Gemma 3's, stored as inputs by outputs
                    turned |= () in shapes.values()  # single numbers
                    turned |= name in ("visual.class_embed.weight", "visual.newline.weight")  # single rows
                    got = read_part(expression, part, shapes, source.read, (lambda w=whole: w) if turned else never)
                    assert torch.equal(got, whole[first:last]), name
                    slack = 0 if "qkv" in name else len(shapes)  # a gate's row without its up's, at an end
                    row = whole[0].numel() if whole.dim() < 3 else shapes[next(iter(shapes))][-1]
                    # Two rows, of which a part may need both, and a single row.
                    if (arch, name.rpartition(".")[2]) == ("kimi_linear", "A_log") or (
                        name == "visual.pos_embed.weight" and arch == "gemma4"
                    ):
                        row = whole.numel()
                    if name.endswith("correction.bias"):  # ERNIE's is one row in files
                        row = whole.numel()
                    assert source.read_elements <= got.numel() + slack * row, (name, rank, ranks)


def read(expression: Expression, part: Part, **tensors: Tensor) -> Tensor:
    return read_part(
        expression,
        part,
        {name: tensor.shape for name, tensor in tensors.items()},
        lambda name, first, last: tensors[name][first:last],
        lambda: expression.pack(tensors),
    )


def test_columns_of_a_part() -> None:
    weight = torch.arange(24).view(6, 4)
    part = Part((2, 1), (3, 2))
    assert torch.equal(read(Name("a"), part, a=weight), weight[2:5, 1:3])


def test_a_part_of_each_expert() -> None:
    """Of experts that are stored one by one only the rows of the part are read."""
    gates, ups = (torch.arange(24).view(2, 4, 3) + start for start in (0, 100))
    pairs = Stack([Cat([f"gate{x}", f"up{x}"], 0, [4, 4]) for x in range(2)], 0)
    tensors = {f"{name}{x}": rows[x] for name, rows in (("gate", gates), ("up", ups)) for x in range(2)}
    whole = torch.cat([gates, ups], 1)
    for start, end in ((0, 2), (3, 5), (5, 8)):
        source = Source({name: tensor.shape for name, tensor in tensors.items()})
        source.tensors = tensors
        part = Part((0, start, 0), (2, end - start, 3))
        got = read_part(pairs, part, {name: tensor.shape for name, tensor in tensors.items()}, source.read, never)
        assert torch.equal(got, whole[:, start:end])
        assert source.read_elements == got.numel()
    assert torch.equal(read(pairs, Part((0, 0, 1), (2, 8, 2)), **tensors), whole[..., 1:])
    assert torch.equal(read(pairs, Part((1, 2, 0), (1, 3, 1)), **tensors), whole[1:, 2:5, :1])


def test_an_expression_that_takes_rows_apart_is_read_whole() -> None:
    weight = torch.arange(24).view(6, 4)
    turned = Rearrange("a b -> b a", "a")
    assert plan_rows(turned, Part((0, 0), (2, 6)), {"a": (6, 4)}) is None
    assert torch.equal(read(turned, Part((1, 0), (2, 6)), a=weight), weight.T[1:3])
    numbers = {"a": torch.tensor(3), "b": torch.tensor(5)}
    assert read(Stack(["a", "b"], 0), Part((1,), (1,)), **numbers).tolist() == [5]


@pytest.mark.parametrize(
    ("expression", "ndim", "expected"),
    [
        (Name("a"), 2, 2),
        (Cat(["a", "b"], 0, [1, 1]), 2, 1),
        (Cat(["a", "b"], 1, [1, 1]), 2, 0),
        (Stack(["a", "b"], 0), 3, 2),
        (Stack(["a", "b"], 1), 3, 1),
        (Rearrange("(g n) ... -> g n ...", "a", g=2), 3, 1),
        (Rearrange("x a b -> x b a", "a"), 3, 0),
        (Rearrange("x (two f) c -> x (f two) c", "a", two=2), 3, 1),
        (Split("a", 0, {"p": 1, "q": 1}, Cat(["q", "p"], 0, [1, 1])), 2, 1),
        (Split(Cat(["a", "b"], 0, [1, 1]), 0, {"p": 1, "q": 1}, Cat(["q", "p"], 0, [1, 1])), 2, 0),
    ],
    ids=str,
)
def test_untouched_dimensions(expression: Expression, ndim: int, expected: int) -> None:
    assert untouched(expression, ndim, {"a": (4, 4), "b": (4, 4)}) == expected


def test_many_short_runs_are_read_as_one() -> None:
    rows = 4 * MAX_RUNS
    weight = torch.arange(2 * rows).view(rows, 2)
    even_first = Rearrange("(f two) c -> (two f) c", "a", two=2)
    plan = plan_rows(even_first, Part((0, 0), (rows // 2, 2)), {"a": weight.shape})
    assert plan is not None
    assert plan.runs == {"a": [(0, rows - 1)]}
    assert torch.equal(read(even_first, Part((0, 0), (rows // 2, 2)), a=weight), weight[::2])


def test_dtypes_that_differ() -> None:
    pair = Cat(["a", "b"], 0, [2, 2])
    a, b = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.float16)
    with pytest.raises(ValueError, match=re.escape("a, b: tensors that form one parameter must have one dtype")):
        read(pair, Part((0, 0), (4, 3)), a=a, b=b)
