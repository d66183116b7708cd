"""Generation on ranks that share the weights of a model under FSDP, each with prompts of its own.

Under FSDP a forward is a series of collectives, so all ranks must run the same number of forwards. One rank may
run a prefill while another runs a step.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from liger_models.distributed.collectives import all_reduce
from liger_models.generation.eval_mode import evaluating
from liger_models.layers.decoder import Decoder
from liger_models.layers.kv_cache import DecodeCache

EVERY = 16
"""Number of forwards after which ranks tell each other whether they still have work."""


@contextmanager
def in_lockstep(model: Decoder) -> Iterator[None]:
    """Context in which ranks may run different numbers of forwards of a model that FSDP has sharded.

    On exit a rank runs forwards of one token until all ranks have reached their exit. All ranks must enter, and every
    forward must have a cache and run the head, so that all ranks call the same collectives. Nothing happens to a model
    that FSDP has not sharded.
    """
    groups = [group for group in model.groups.data if group.size > 1]
    if not groups:
        yield
        return
    count, leaving, all_left = 0, False, False

    # All ranks have run equally many forwards when they come here, so the reductions match.
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
