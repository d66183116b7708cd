"""Group-relative policy optimization (GRPO): the model samples answers, which a reward function scores."""

import importlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from liger_models.base.causal_lm import CausalLM
from liger_models.base.vision_language import placeholder_ids
from liger_models.data.answers import padded
from liger_models.data.batch import Batch, join_rows
from liger_models.data.dataset import PackedDataset
from liger_models.data.prompts import PromptDataset
from liger_models.data.sampled_answers import answer_tokens, pack_answers
from liger_models.distributed.ranks import raise_on_all_ranks, world_size
from liger_models.generation.deterministic import deterministic_forward
from liger_models.generation.deterministic import refusal as deterministic_refusal
from liger_models.generation.float8_weights import refusal as float8_refusal
from liger_models.generation.options import UNFILTERED, resolve
from liger_models.generation.rollout_checks import refusal
from liger_models.generation.rollouts import free_memory
from liger_models.kernels.loss.linear_logprobs import fused_linear_logprobs
from liger_models.layers.layer import layers_of
from liger_models.layers.lm_head import select_tokens
from liger_models.losses.grpo import TOKEN_MEANS, LigerFusedLinearGRPOLoss
from liger_models.parallel.gathered import reshard, unsharded
from liger_models.parallel.step import targets_per_rank
from liger_models.train.objectives import (
    INPUTS,
    Load,
    Metrics,
    Objective,
    Reference,
    pair,
    reader_of,
    share_in,
    with_pixels,
)

Reward = Callable[..., Any]
REWARD_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""Arguments that a reward function gets in addition to the columns of the data."""


class GRPOObjective(Objective):
    """Group-relative policy optimization (GRPO), on answers that the trained model samples itself."""

    formats = ("prompt",)
    shares_rows, compares, is_gentle = False, True, True

    def __init__(self, options: Any, **settings: Any) -> None:
        super().__init__(options)
        # The reward function and the sampling options.
        if "reward" not in settings:
            raise ValueError(
                "TrainOptions: objective grpo needs a reward, got none. Name a function: file.py:function."
            )
        self.reward_name = settings.pop("reward")
        self.reward = load_function(self.reward_name)
        self.reference = Reference(options, settings.pop("ref_model", None))
        self.generations, self.new = settings.pop("num_generations", 8), settings.pop("max_new_tokens", 256)
        self.repeats, self.scales = settings.pop("num_iterations", 1), settings.pop("scale_rewards", True)
        self.replays = settings.pop("replay_routing", False)
        self.deterministic = settings.pop("deterministic_rollouts", False)
        self.rollout_dtype = settings.pop("rollout_dtype", None)
        if options.save_every % self.repeats != 0:
            raise ValueError(
                f"TrainOptions: save_every must be a multiple of num_iterations, got {options.save_every} and "
                f"{self.repeats}: a checkpoint does not hold sampled answers."
            )
        if options.length <= self.new:
            raise ValueError(
                f"TrainOptions: length must be more than max_new_tokens, got {options.length} and {self.new}."
            )

        settings.pop("mtp_weight", None)

        # The loss. `prepare` creates the loss again with the settings of the model's head.
        self.temperature = settings.get("temperature", 1.0)
        if self.rollout_dtype is not None and (self.deterministic or self.temperature != 1):
            raise ValueError(
                "TrainOptions: rollout_dtype needs temperature 1 and no deterministic_rollouts, got temperature "
                f"{self.temperature} and deterministic_rollouts {self.deterministic}. Leave rollout_dtype out."
            )
        low = settings.pop("epsilon", 0.2)
        ranges = {"epsilon_low": low, "epsilon_high": settings.pop("epsilon_high", low)}
        self.settings: dict[str, Any] = {"beta": 0.0, "max_completion_length": self.new, **ranges, **settings}
        self.function = LigerFusedLinearGRPOLoss(**self.settings)

    def prepare(self, model: CausalLM, load: Load) -> None:
        """See `Objective.prepare`."""
        if self.replays and (not model.routers or not model.replays_routing):
            raise ValueError(
                "TrainOptions: replay_routing needs routed experts in blocks that replay routing, got "
                f"{type(model).__name__}. Leave it out."
            )
        refused = deterministic_refusal(model) if self.deterministic else None
        if refused is not None:
            raise ValueError(f"TrainOptions: deterministic_rollouts: {refused}. Leave it out.")
        # A model that FSDP shards is gathered for the rollout, which then checks it.
        is_whole = self.rollout_dtype is not None and not model.groups.data
        refused = float8_refusal(model) if is_whole else None
        if refused is not None:
            raise ValueError(f"TrainOptions: rollout_dtype: {refused}. Leave it out.")
        self.head: dict[str, Any] = {"softcap": model.lm_head.softcap, "logit_scale": model.lm_head.logit_scale}
        self.function = LigerFusedLinearGRPOLoss(**self.settings, **self.head)
        if self.function.beta:
            self.reference.prepare(load)

    def frozen_models(self) -> dict[str, str]:
        """See `Objective.frozen_models`."""
        return self.reference.frozen_models() if self.function.beta else {}

    def dataset(self, source: Any, model: CausalLM, *, overflow: str | None, **options: Any) -> PackedDataset:
        """See `Objective.dataset`.

        Raises:
            ValueError: a column of the data has the name of an argument that every reward function gets
                (`REWARD_ARGUMENTS`).
        """
        # Prompts are limited in length, so that a prompt and its answer fit into a row.
        data = PromptDataset(source, reader_of(model), **{**options, "length": options["length"] - self.new})
        rows: Any = data.rows
        records = itertools.chain.from_iterable(part.records for part in getattr(rows, "parts", [rows]))
        clashes = {name for record in records for name in record}.intersection(REWARD_ARGUMENTS)
        if clashes:
            raise ValueError(
                f"TrainOptions: data of objective grpo must have no column {' or '.join(REWARD_ARGUMENTS)}, which the "
                f"reward gets about the answers, got {', '.join(sorted(clashes))}. Rename it."
            )
        return data

    @torch.no_grad()
    def batch(self, model: CausalLM, rows: Any) -> Batch:
        """Sample ``num_generations`` answers to each prompt of a batch, and compute their rewards.

        Answers share the tokens of their prompt (`pack_answers`) if the model and the options allow it. Otherwise each
        answer follows a copy of its prompt.

        Returns:
            The inputs of a forward, and for B = prompts x num_generations answers: ``answer_tokens`` [B, n], see
            `pack_answers`, ``rewards`` [B] and ``advantages`` [B]. With ``replay_routing``, the inputs include the
            experts that each token was routed to. With ``deterministic_rollouts``, a batch that is used for several
            steps also has ``old`` [B, n], the log-probabilities under the policy that sampled the answers. With
            ``rollout_dtype``, ``sampling`` [B, n] has the log-probabilities with which the rollout drew the tokens.
        """
        # Sample answers, and compare each reward with the rewards of the other answers to the same prompt.
        answers, experts, log_probs, drafted = self._answers(model, rows)
        reshard(model)
        prompts, pixels = [row["ids"] for row in rows], [row["pixels"] for row in rows]
        rows = [row for row in rows for _ in range(self.generations)]
        with raise_on_all_ranks():
            numbers = self._rewards(model, [row["example"] for row in rows], answers)
        # In float64, because rewards may be large and differ by little. [B] -> [prompts, num_generations]
        rewards = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        groups = rewards.view(-1, self.generations)
        advantages = groups - groups.mean(1, keepdim=True)
        if self.scales:
            advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)

        filler, experts = model.tokenizer.padding_id, experts if self.replays else []
        # A multi-token prediction block predicts the token after the next one, which must be in the same document.
        batch, shares = None, not self.deterministic and self.block is None
        if shares and share_in(model, self.reference.model):
            batch, tokens = pack_answers(prompts, answers, filler=filler, routed_experts=experts)
            batch = with_pixels(model, batch, join_rows(pixels))
        if batch is None:
            batch, tokens = self._with_copies(rows, answers, filler, experts)
        # A placeholder in an answer has no image, so the model would refuse it. It stays a label, and the tokens after
        # it see padding instead.
        placeholders = torch.tensor(placeholder_ids(model.config), dtype=torch.int64, device="cpu")
        sampled = torch.isin(batch["labels"], placeholders)
        batch["input_ids"] = batch["input_ids"].masked_fill(sampled, filler)
        batch["answer_tokens"] = tokens
        if self.deterministic and self.repeats > 1 and self.temperature == 1:
            batch["old"] = _padded(log_probs, tokens.shape[1])
        if self.rollout_dtype is not None:
            batch["sampling"] = _padded(log_probs, tokens.shape[1])
        if drafted is not None:
            batch["drafted"] = drafted
        return {**batch, "rewards": rewards.float(), "advantages": advantages.float().flatten()}

    @staticmethod
    def _with_copies(rows: Any, answers: list[list[int]], filler: int, experts: list[Tensor]) -> tuple[Batch, Tensor]:
        """Return a batch in which each row is a prompt and one answer, and the tokens that predict the answers.

        The arguments and results are like those of `pack_answers`, except that ``rows`` has a prompt, which may have
        images, for each answer.
        """
        # The prompt's tokens have no label. The bitwise complement of a token id marks a token without a label.
        pairs = [(row["ids"], answer) for row, answer in zip(rows, answers, strict=True)]
        documents = [torch.tensor([*(~token for token in prompt), *answer], device="cpu") for prompt, answer in pairs]
        batch = padded(documents, max(map(len, documents)), filler, [row["pixels"] for row in rows])
        T = batch["input_ids"].shape[1]
        if experts:  # [B, T, L, K]
            padding = (0, 0, 0, 0, 0)
            batch["routed_experts"] = torch.stack([F.pad(ids, (*padding, T - len(ids)), value=-1) for ids in experts])
        starts = [number * T + len(prompt) - 1 for number, (prompt, _) in enumerate(pairs)]
        return batch, answer_tokens(starts, [len(answer) for answer in answers])

    def _answers(self, model: CausalLM, rows: Any) -> tuple[list[list[int]], list[Any], list[Tensor], Tensor | None]:
        """Sample ``num_generations`` answers to each prompt, each up to and including its stop token.

        Answers to the same prompt are consecutive.

        Returns:
            Four values: the answers; the experts of all tokens in prompts and answers, if `rollout` sampled the
            answers and routing is replayed; the log-probabilities of the answers, if `rollout` sampled the answers; a
            tensor [2] with the number of accepted drafts and the number of forwards, if the multi-token prediction
            block drafted tokens.
        """
        prompts: list[list[int]] = [[*row["ids"]] for row in rows]
        longest = max(map(len, prompts))
        inputs: dict[str, Any] = {**join_rows([row["pixels"] for row in rows])}
        options: dict[str, Any] = {"max_new_tokens": self.new, "do_sample": True, "temperature": self.temperature}
        options |= {"num_return_sequences": self.generations, **UNFILTERED}

        # Sampling is fastest with unsharded parameters and with `rollout`, if there is memory for both.
        gathers = has_room(model)
        with unsharded(model) if gathers else nullcontext(model) as policy:
            refused = refusal(policy, longest + self.new, prompts[0]) if not inputs else "prompts must have no images"
            if refused is None:
                drafts: dict[str, Any] = {"draft_model": self.block, "num_draft_tokens": 1} if self.block else {}
                rows = policy.rollout(
                    prompts, **options, **drafts, record_routing=self.replays, deterministic=self.deterministic,
                    **self._dtypes(policy),
                )  # fmt: skip
                answers, drafted = [row.tokens.tolist() for row in rows], None
                if drafts:
                    rounds = sum(row.rounds for row in rows)
                    drafted = torch.tensor([sum(map(len, answers)) - rounds, rounds], dtype=torch.float32, device="cpu")
                return answers, [row.routed_experts for row in rows], [row.log_probs for row in rows], drafted
            needs_rollout = {
                "replay_routing": self.replays,
                "deterministic_rollouts": self.deterministic,
                "rollout_dtype": self.rollout_dtype is not None,
            }
            for name, is_used in needs_rollout.items():
                if is_used:
                    raise ValueError(f"TrainOptions: {name} needs rollout, but {refused}. Leave it out.")
            # If FSDP gathers parameters in each forward, all ranks must run the same number of forwards, so no
            # answer may end early.
            ends: dict[str, Any] = {} if gathers or world_size() == 1 else {"eos_token_id": []}
            pad = model.tokenizer.padding_id
            sampled = policy.generate(prompts, **options, **ends, **inputs, pad_token_id=pad)[:, longest:].tolist()
        stops = set(resolve(model, self.new, {}).eos_token_id)
        return [_until(ids, stops) for ids in sampled], [], [], None

    def _dtypes(self, policy: CausalLM) -> dict[str, Any]:
        """Return the dtypes in which a rollout holds weights, keys and values. None stands for the model's dtype.

        Weights that FSDP shards are not rounded, and neither are latents.
        """
        latents = any(layer.attention and layer.attention.caches_latents for layer in layers_of(policy.layers))
        return {
            "weight_dtype": None if policy.groups.data else self.rollout_dtype,
            "cache_dtype": None if latents else self.rollout_dtype,
        }

    def _rewards(self, model: CausalLM, examples: list[Any], answers: list[list[int]]) -> list[float]:
        """Call the reward function with the arguments that TRL's trainer passes, and check the rewards."""
        # Pass all columns of the data. Completions have the same form as the prompts: text or messages.
        names = dict.fromkeys(name for example in examples for name in example if name != "prompt")
        texts: list[Any] = [model.tokenizer.decode(answer) for answer in answers]
        texts = [
            text if isinstance(example["prompt"], str) else [{"role": "assistant", "content": text}]
            for text, example in zip(texts, examples, strict=True)
        ]
        rewards = self.reward(
            prompts=[example["prompt"] for example in examples],
            completions=texts,
            completion_ids=[[*answer] for answer in answers],  # copies, because the function may change them
            **{name: [example.get(name) for example in examples] for name in names},
        )

        # The rewards may be a tensor, an array or a sequence.
        rewards = rewards.tolist() if hasattr(rewards, "tolist") else rewards
        # Iterating over a dict would yield its keys, and a set has no order.
        is_ordered = isinstance(rewards, Iterable) and not isinstance(rewards, Mapping | Set | str | bytes)
        rewards = [*rewards] if is_ordered else rewards
        if not isinstance(rewards, list) or len(rewards) != len(answers) or not all(map(_is_number, rewards)):
            raise ValueError(
                f"{self.reward_name}: must return {len(answers)} finite numbers, one for each completion, got "
                f"{str(rewards)[:60]}. Correct the function; if it has several rewards, let it return their sums."
            )
        return [float(reward) for reward in rewards]

    def num_items(self, batches: list[Batch]) -> Tensor | None:
        """See `Objective.num_items`."""
        return targets_per_rank(batches) * world_size() if self.function.loss_type in TOKEN_MEANS else None

    def loss(self, model: CausalLM, batch: Batch, num_items: Tensor | None) -> tuple[Tensor, Metrics]:
        """See `Objective.loss`.

        In the first step on a batch, this method adds the log-probabilities of the sampling policy and of the reference
        model to ``batch``.
        """
        inputs = {name: tensor for name, tensor in batch.items() if name in INPUTS}
        replayed = {"routed_experts": batch["routed_experts"]} if self.replays else {}

        def head_log_probs(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
            x, target = select_tokens(x, target, batch["answer_tokens"])
            return self._log_probs(x, weight, target)

        def log_probs(model: CausalLM, **more: Tensor) -> Tensor:
            values: Tensor = model(**inputs, **more, loss_function=head_log_probs).loss
            return values

        # The first step on a batch computes the log-probabilities under the sampling policy and under the reference
        # model.
        if self.repeats > 1 and "old" not in batch:
            with torch.no_grad(), self._forward(model):
                batch["old"] = log_probs(model, **replayed)
            reshard(model)
        if self.function.beta and "reference" not in batch:
            batch["reference"] = self.reference(model, log_probs)

        def policy_loss(x: Tensor, weight: Tensor, target: Tensor) -> Any:
            x, target = select_tokens(x, target, batch["answer_tokens"])
            return self.function(
                x, weight, target, target != -100, batch["advantages"], num_items_in_batch=num_items,
                ref_per_token_logps=batch.get("reference"), old_per_token_logps=batch.get("old"),
                sampling_per_token_logps=batch.get("sampling"),
            )  # fmt: skip

        with self._forward(model):
            block, mtp_loss = self.trained_block, None
            if block is None:
                out = model(**inputs, **replayed, loss_function=policy_loss)
                (loss, metrics), aux_loss = out.loss, out.aux_loss
            else:
                (loss, metrics), mtp_loss, aux_loss = block.losses(**inputs, **replayed, loss_function=policy_loss)

        # A loss that is not a mean over all tokens of the step is a mean over the batches of the step.
        loss = loss / (1 if num_items is not None else self.accumulate)
        loss = loss if aux_loss is None else loss + aux_loss / self.accumulate
        targets = (batch["labels"] != -100).sum()
        drafts: Metrics = {}
        if block is not None and mtp_loss is not None:
            loss = loss + block.loss_weight * mtp_loss / self.accumulate
            drafts["mtp_loss"] = pair(mtp_loss * targets, targets)
        names = (
            ["kl"] * bool(self.function.beta) + ["clip_ratio"] + ["sampling_logp_difference"] * ("sampling" in batch)
        )
        means = {name: pair(value * targets, targets) for name, value in zip(names, metrics, strict=True)}
        return loss, {**self.evaluate(model, batch), **means, **drafts}

    def _forward(self, model: CausalLM) -> AbstractContextManager[None]:
        """Return the context manager in which the policy's forwards run."""
        return deterministic_forward(model) if self.deterministic else nullcontext()

    def _log_probs(self, x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        values: Tensor = fused_linear_logprobs(x, weight, target, temperature=self.temperature, **self.head)
        return values

    def evaluate(self, model: CausalLM, batch: Batch) -> Metrics:
        """See `Objective.evaluate`. The metrics are rewards and the answers' lengths; there is no loss."""
        groups = batch["rewards"].view(-1, self.generations)
        lengths = (batch["labels"] != -100).sum()
        metrics = {
            "reward": pair(groups.sum(), groups.numel()),
            "reward_std": pair(groups.std(1).sum(), len(groups)),
            "completions/mean_length": pair(lengths, groups.numel()),
        }
        if "drafted" in batch:
            metrics["draft_acceptance"] = batch["drafted"]
        return metrics


def load_function(name: str) -> Reward:
    """Load a function from ``file.py:function`` or ``module:function``. The module may be in the working directory.

    Raises:
        ValueError: there is no such file, module or function.
    """
    source, _, function = name.rpartition(":")
    if not source or not function:
        raise ValueError(f"reward: must be module:function or file.py:function, got {name!r}.")
    if source.endswith(".py"):
        if not Path(source).is_file():
            raise ValueError(f"reward: {source} must be a file, got nothing there. Correct the path.")
        spec = importlib.util.spec_from_file_location(Path(source).stem, source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        if os.getcwd() not in sys.path:  # a console script does not search there
            sys.path.append(os.getcwd())
        try:
            module = importlib.import_module(source)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"reward: {source} must be a module, got: {error}. Name the file: file.py:{function}."
            ) from error
    reward: Any = getattr(module, function, None)
    if not callable(reward):
        raise ValueError(f"reward: {source} must have a function {function}, got none.")
    return reward  # type: ignore[no-any-return]


def has_room(model: CausalLM) -> bool:
    """Return whether every rank has free memory for a 16-bit copy of all parameters and, in addition, for sampling."""
    # All ranks must make the same decision. Parameters take two bytes per element, and sampling needs the same amount
    # of memory.
    free = free_memory(model.device)
    if free is None:
        return True
    needed = 4 * sum(parameter.numel() for parameter in model.parameters())
    room = torch.tensor(int(needed <= free), device=model.device)
    if world_size() > 1:
        dist.all_reduce(room, dist.ReduceOp.MIN)
    return bool(room)


def _padded(rows: list[Tensor], n: int) -> Tensor:
    """Return the rows, which have at most n elements, as a tensor [rows, n] with zeros at their ends."""
    return torch.stack([F.pad(row, (0, n - len(row))) for row in rows])


def _until(ids: list[int], stops: set[int]) -> list[int]:
    """Return the ids up to and including the first id that is in ``stops``."""
    before = list(itertools.takewhile(lambda token: token not in stops, ids))
    return ids[: len(before) + 1]


def _is_number(value: Any) -> bool:
    try:
        return abs(float(value)) <= torch.finfo(torch.float32).max
    except (TypeError, ValueError):
        return False
