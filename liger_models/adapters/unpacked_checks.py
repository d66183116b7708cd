"""Checks that reject settings of a PEFT configuration that PEFT would silently ignore in an `UnpackedModel`."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from liger_models.adapters.lora import matches
from liger_models.base.causal_lm import CausalLM


def check_config(
    config: Any, inner: nn.Module, causal_lm: CausalLM, *, fixed: Sequence[str], embeds_by_lookup: bool
) -> None:
    """Raise ValueError for settings that PEFT would silently ignore.

    Args:
        config: the configuration of an adapter.
        inner: the argument of `unpack_projections`.
        causal_lm: the `CausalLM` in ``inner``, or ``inner`` itself.
        fixed: the names, in transformers, of the parameters that can't have adapters.
        embeds_by_lookup: whether the embedding of ``causal_lm`` only looks up rows.
    """
    _check_targets(config, fixed)
    _check_outputs(config, inner, causal_lm)
    _check_parameters(config)
    _check_tied_tokens(config, causal_lm)
    if not embeds_by_lookup:
        _check_single_tokens(config, causal_lm)


def _check_targets(config: Any, fixed: Sequence[str]) -> None:
    """Refuse a target if it matches a parameter that can't have adapters."""
    targets = getattr(config, "target_modules", None) or []
    if isinstance(targets, str) or config.inference_mode:
        return
    for target in sorted(targets):  # sorted, so that every run raises the same error
        match = next((name for name in fixed if matches(name, target)), None)
        if match is not None:
            raise ValueError(
                f"target_modules must name linear layers, got {target!r}, which means {match} as well. Experts, "
                "routers and patch embeddings have no adapters. Leave it out, or give longer names."
            )


def _check_outputs(config: Any, inner: nn.Module, causal_lm: CausalLM) -> None:
    """Refuse AdaLoRA for models that return tuples, because AdaLoRA sets the attribute ``loss`` of outputs."""
    if config.peft_type == "ADALORA" and inner is causal_lm:
        raise ValueError(
            f"AdaLoRA: the model must return outputs whose loss can be replaced, got {type(inner).__name__}, "
            "which returns tuples. Adapt unpack_projections(liger_models.hf.wrap(model))."
        )


def _check_parameters(config: Any) -> None:
    """Refuse the experts' parameters as targets."""
    parameters = getattr(config, "target_parameters", None)
    if parameters:
        raise ValueError(
            f"target_parameters must be empty, got {sorted(parameters)}. Experts and routers have no adapters in PEFT: "
            "use apply_lora for experts. If you set none, PEFT derived them from target_modules: load the model again, "
            "and list only names of linear layers, such as q_proj, instead of 'all-linear' or names of experts."
        )


def _check_tied_tokens(config: Any, causal_lm: CausalLM) -> None:
    """Refuse to train embeddings of single tokens if the head is tied and the model is not a classifier."""
    has_head = next(causal_lm.lm_head.parameters(), None) is not None
    if not (causal_lm.config.tie_word_embeddings and has_head):
        return
    for option in ("trainable_token_indices", "token_indices", "ensure_weight_tying"):
        value = getattr(config, option, None)
        if value:
            raise ValueError(
                f"{option} must be empty in a model that ties the head to the embedding, got {value}. Leave it "
                "out; modules_to_save trains copies of either."
            )


def _check_single_tokens(config: Any, causal_lm: CausalLM) -> None:
    """Refuse to train embeddings of single tokens. PEFT would skip the operations that the embedding applies after the
    lookup."""
    for option in ("trainable_token_indices", "token_indices"):
        value = getattr(config, option, None)
        if value:
            raise ValueError(
                f"{option} must be empty for {type(causal_lm).__name__}, got {value}. PEFT would leave out "
                "the norm of its embedding; modules_to_save=['embed_tokens'] trains the whole embedding."
            )
