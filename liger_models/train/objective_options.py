"""The options of the training objectives. The help text of an option begins with the objectives that read it."""

# ruff: noqa: RUF009 (`_of` returns a field)

from dataclasses import dataclass, fields
from typing import Any

from liger_models.train.grpo import GRPOObjective
from liger_models.train.objectives import (
    CPOObjective,
    DistillObjective,
    DPOObjective,
    KTOObjective,
    Objective,
    ORPOObjective,
    PretrainObjective,
    SimPOObjective,
)
from liger_models.train.options import option
from liger_models.train.retrieval import EmbedObjective, RerankObjective

OBJECTIVES: dict[str, type[Objective]] = {
    "sft": Objective,
    "pretrain": PretrainObjective,
    "dpo": DPOObjective,
    "orpo": ORPOObjective,
    "cpo": CPOObjective,
    "simpo": SimPOObjective,
    "kto": KTOObjective,
    "distill": DistillObjective,
    "grpo": GRPOObjective,
    "embed": EmbedObjective,
    "rerank": RerankObjective,
}


def _of(objectives: str, help: str, default: Any = None, **checks: Any) -> Any:
    """Return an option that only the listed objectives read."""
    return option(f"{objectives}: {help}", default, read_by=("objective", objectives.split(", ")), **checks)


@dataclass(kw_only=True)
class ObjectiveOptions:
    """Objective.

    The objective and its options, with the names that TRL uses. None means the default of the objective.
    """

    objective: str | None = option(
        "what is learned: sft, pretrain, dpo, orpo, cpo, simpo, kto, distill, grpo, embed or rerank; default: dpo for "
        "pairs, kto for labeled answers, and otherwise sft",
        None,
        choices=tuple(OBJECTIVES),
    )
    beta: float | None = _of(
        "dpo, orpo, cpo, simpo, kto, distill, grpo",
        "strength of the preference (default: 0.1); position of the Jensen-Shannon divergence between forward and "
        "reverse KL (0.5); weight of the KL divergence from the reference (0)",
    )
    loss_type: str | None = _of("dpo, cpo, grpo", "form of the loss (default: sigmoid; for grpo dapo)")
    label_smoothing: float | None = _of("dpo, cpo, simpo", "probability that a label is wrong (default: 0)")
    ref_model: str | None = _of(
        "dpo, kto, grpo", "reference model (default: the model before training; with adapters, without them)"
    )
    cpo_alpha: float | None = _of(
        "cpo, simpo", "weight of the chosen answers' NLL (default: 1; for simpo 0)", at_least=0
    )
    simpo_gamma: float | None = _of("simpo", "margin of the rewards (default: 0.5)")
    desirable_weight: float | None = _of("kto", "weight of good answers (default: 1)", at_least=0)
    undesirable_weight: float | None = _of("kto", "weight of bad answers (default: 1)", at_least=0)
    teacher: str | None = _of("distill", "model whose distributions are learned: a folder, or a name on the hub")
    divergence: str | None = _of("distill", "jsd (default), forward_kl, reverse_kl, tvd or cosine")
    temperature: float | None = _of(
        "distill, grpo, embed", "divisor of the logits (default: 1), or of the cosines (0.05)"
    )
    weight_hard_loss: float | None = _of("distill", "weight of the cross entropy (default: 0.5)", at_least=0)
    weight_soft_loss: float | None = _of("distill", "weight of the divergence (default: 0.5)", at_least=0)

    mtp_weight: float | None = _of(
        "sft, pretrain, grpo",
        "weight of the loss of the multi-token prediction block, which is then trained with the model, and drafts "
        "tokens in rollouts; 0: it only drafts (default: the block is kept)",
        at_least=0,
    )

    reward: str | None = _of("grpo", "function that rewards answers: module:function or file.py:function")
    num_generations: int | None = _of("grpo", "answers to each prompt (default: 8)", at_least=2)
    max_new_tokens: int | None = _of("grpo", "the most tokens of an answer (default: 256)", at_least=1)
    epsilon: float | None = _of(
        "grpo", "how far the ratio of probabilities is clipped (default: 0.2)", may_be_infinite=True
    )
    epsilon_high: float | None = _of("grpo", "the same upwards (default: epsilon)", may_be_infinite=True)
    num_iterations: int | None = _of("grpo", "steps on the same answers (default: 1)", at_least=1)
    scale_rewards: bool | None = _of("grpo", "divide by the rewards' deviation in a group (default: true)")
    replay_routing: bool | None = _of("grpo", "train through the experts that sampled the answers (default: false)")
    rollout_dtype: str | None = _of(
        "grpo",
        "float8: sample with float8 copies of the weights and with keys and values in float8, which is faster; the "
        "loss corrects for the difference (default: the model's dtype)",
        choices=("float8",),
    )
    deterministic_rollouts: bool | None = _of(
        "grpo", "sample and train with the same bits of log-probabilities, which is slower (default: false)"
    )

    pooling: str | None = _of("embed", "lasttoken, mean or cls (default: the checkpoint's, or lasttoken)")
    bidirectional: bool | None = _of(
        "embed", "let tokens attend to later ones, as in an encoder (default: as the checkpoint)"
    )
    symmetric: bool | None = _of("embed", "compare documents with all queries, too (default: false)")
    matryoshka_dims: list[int] = _of(
        "embed", "numbers of leading dimensions that are embeddings of their own, such as 1024 256 64", []
    )
    query_prompt: str | None = _of("embed", "text before each query (default: the checkpoint's prompt query, if any)")
    document_prompt: str | None = _of("embed", "text before each document (default: the checkpoint's, if any)")
    instruction: str | None = _of("rerank", "what a document must do for a query (default: answer a web search)")


def make_objective(options: Any) -> Objective:
    """Create the objective of a run from the run's checked options.

    Raises:
        ValueError: an option is out of the range that the objective allows.
    """
    # None means the objective's default, so it is not passed.
    settings = {
        field.name: getattr(options, field.name)
        for field in fields(ObjectiveOptions)
        if field.name != "objective" and getattr(options, field.name) not in (None, [])
    }
    return OBJECTIVES[options.objective](options, **settings)
