"""Generation under FSDP, on ranks that share the weights of a model but have different prompts.

Under FSDP, a forward is a series of collectives, so all ranks must run the same number of forwards. One rank may run
a prefill while another rank runs a decoding step.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from liger_models.distributed.collectives import all_reduce
from liger_models.generation.eval_mode import evaluating
from liger_models.layers.decoder import Decoder
from liger_models.layers.kv_cache import DecodeCache

EVERY = 16
"""Number of forwards after which the ranks tell each other whether they still have work."""


@contextmanager
def in_lockstep(model: Decoder) -> Iterator[None]:
    """Context manager that lets ranks run different numbers of forwards of a model that FSDP has sharded.

    A rank that reaches the end of the context early runs further forwards of one token until all ranks have reached the
    end. All ranks must enter the context. Every forward must use a cache and run the head, so that all ranks call the
    same collectives. If FSDP has not sharded the model, the context does nothing.
    """
    groups = [group for group in model.groups.data if group.size > 1]
    if not groups:
        yield
        return
    count, leaving, all_left = 0, False, False

    # All ranks call this function after the same number of forwards, so the all-reduces match.
    def tell(*_: object) -> None:
        nonlocal count, all_left
        count += 1
        if count % EVERY == 0:
            at_work = torch.tensor(0 if leaving else 1, device=model.device)  # summed: number of ranks with work
            for group in groups:
                at_work = all_reduce(at_work, group)
            all_left = leaving and not at_work.item()

    handle = model.register_forward_hook(tell)
    try:
        yield
        leaving = True
        with torch.no_grad(), evaluating(list(model.modules())):
            while not all_left:
                model(torch.zeros(1, 1, dtype=torch.int64, device=model.device), cache=DecodeCache(1))
    finally:
        handle.remove()
