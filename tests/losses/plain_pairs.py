"""Shared by the tests of preference losses: losses over pairs in fp64, written down from the papers."""

import torch
from torch import Tensor

from .plain import plain_log_probs, plain_logits

ROWS, PAIRS = 8, 4
HEADS = [{}, {"softcap": 3.0, "logit_scale": 1.5}]


def sigma(x):
    return 1 / (1 + torch.exp(-x))


def sequences(log_probs, target, ignore_index, average):
    totals = log_probs.sum(1)
    counts = (target != ignore_index).sum(1)
    return totals / counts.clamp(min=1) if average else totals


def plain_dpo_losses(kind, chosen, rejected, beta, e, tau=0.05):
    w, l, m = beta * chosen, beta * rejected, beta * (chosen - rejected)  # noqa: E741
    log = torch.log
    return {
        "sigmoid": lambda: -(1 - e) * log(sigma(m)) - e * log(sigma(-m)),
        "hinge": lambda: torch.clamp(1 - m, min=0),
        "ipo": lambda: ((chosen - rejected) - 1 / (2 * beta)) ** 2,
        "robust": lambda: (-(1 - e) * log(sigma(m)) + e * log(sigma(-m))) / (1 - 2 * e),
        "exo_pair": lambda: sigma(m) * log(sigma(m) / (1 - e)) + sigma(-m) * log(sigma(-m) / e),
        "nca_pair": lambda: -log(sigma(w)) - log(sigma(-w)) / 2 - log(sigma(-l)) / 2,
        "bco_pair": lambda: -log(sigma(w)) - log(sigma(-l)),
        "sppo_hard": lambda: (chosen - 1 / (2 * beta)) ** 2 + (rejected + 1 / (2 * beta)) ** 2,
        "apo_zero": lambda: 1 - sigma(w) + sigma(l),
        "apo_down": lambda: sigma(w) + 1 - sigma(m),
        "discopop": lambda: -log(sigma(m)) * (1 - sigma(m / tau)) + torch.exp(-m) * sigma(m / tau),
    }[kind]()


def plain_paired(
    pair_losses, target, *, beta, average, alpha=None, reference=None, nll_target=None, ignore_index=-100, extra=None,
    **head,
):  # fmt: skip
    """``(x, weight, bias) -> (loss, metrics)``; ``alpha`` None for no NLL; ``reference`` [rows] log-probabilities."""

    def function(x, weight, bias=None):
        log_probs = plain_log_probs(x, weight, bias, target, ignore_index, **head)
        logps = sequences(log_probs, target, ignore_index, average)
        ratios = logps if reference is None else logps - reference
        loss = pair_losses(ratios[:PAIRS], ratios[PAIRS:]).mean()
        nll = torch.zeros((), dtype=torch.float64)
        if alpha is not None:
            chosen = target[:PAIRS] if nll_target is None else nll_target[:PAIRS]
            tokens = plain_log_probs(x[:PAIRS], weight, bias, chosen, ignore_index, **head)
            nll = -tokens.sum() / max((chosen != ignore_index).sum().item(), 1)
            loss = loss + alpha * nll
        raw = plain_logits(x, weight, bias, logit_scale=head.get("logit_scale", 1.0))
        metrics = [
            logps[:PAIRS], logps[PAIRS:], raw[:PAIRS].mean(), raw[PAIRS:].mean(), nll,
            beta * ratios[:PAIRS], beta * ratios[PAIRS:],
        ]  # fmt: skip
        if extra is not None:
            metrics += extra(logps[:PAIRS], logps[PAIRS:])
        return loss, [metric.detach() for metric in metrics]

    return function


def bound(loss, target, *rest, **kwargs):
    """``(x, weight, bias) -> (loss, metrics)`` of a module that takes the weight first."""

    def function(x, weight, bias=None):
        moved = {k: v.to(x) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
        return loss(weight, x, target.to(x.device), bias, *(r.to(x) for r in rest), **moved)

    return function
