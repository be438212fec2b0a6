"""What is refused before TRL begins to train: what would train on something else than what was stored, in silence.

Every check raises UsageError with one line that says what to change.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from packaging.specifiers import SpecifierSet
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from rollgen.errors import UsageError
from rollgen.format.reader import read_row_group
from rollgen.format.schema import TOKENIZER_DIR
from rollgen.integrations.groups import Groups
from rollgen.integrations.trl_rows import ROLLOUTS, fields_of
from rollgen.prompts.fingerprint import stored_tokenizer, tokenizer_sha256
from rollgen.prompts.messages import stored_messages

if TYPE_CHECKING:
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase
    from trl import GRPOConfig, GRPOTrainer

    from rollgen.format.reader import StoredDataset
    from rollgen.loader.index import Index

IncompleteGroups = Literal["raise", "drop"]

SUPPORTED: Final = SpecifierSet(">=1.13,<1.17")
"""Versions of TRL whose private methods, those that are overridden, have been read and tested."""
_REFUSED_SETTINGS: Final = {
    "use_vllm": "nothing is sampled here",
    "use_liger_kernel": "supports do not reach its fused loss",
    "remove_unused_columns": "it would remove the numbers of the samples",
    "ignore_data_skip": "a run that is resumed would use the samples of its epoch again",
}
_REFUSED_LOADING: Final = ("split_batches", "dispatch_batches")
"""Of `accelerator_config`: processes would be dealt other samples than those of the sampler, or none."""
_REFUSED_ARGUMENTS: Final = ("train_dataset", "rollout_func", "tools", "environment_factory")
_COLUMNS: Final = ("prompt_length", "response_length", "prompt", "metadata")
_LOG = logging.getLogger(__name__)


def check_version() -> None:
    """A version of TRL that is known: what is overridden are private methods."""
    try:
        found = version("trl")
    except PackageNotFoundError:
        raise UsageError("trl is not installed: pip install -e '.[trl]' in the clone of rollgen") from None
    if found not in SUPPORTED:
        raise UsageError(
            f"trl {found}: rollgen overrides private methods of TRL and knows those of {SUPPORTED}: "
            f"pip install 'trl{SUPPORTED}'"
        )


def check_settings(
    args: GRPOConfig, options: Mapping[str, Any], functions: Sequence[Any], rewards: Sequence[str], rollouts: object
) -> None:
    """Settings and arguments of TRL's trainer, with these reward functions and names of stored rewards."""
    if not isinstance(rollouts, str | os.PathLike):
        raise UsageError("rollouts: the directory or URL of one dataset; merge several with `rollgen merge`")
    if not functions and not rewards:
        raise UsageError("no reward: give reward_funcs, or rewards=NAME of one that `rollgen score` stored")
    for name, reason in _REFUSED_SETTINGS.items():
        if getattr(args, name):
            raise UsageError(f"GRPOConfig({name}=True): {reason}; leave it out")
    for name in _REFUSED_LOADING:
        if getattr(args.accelerator_config, name):
            raise UsageError(
                f"accelerator_config={{{name!r}: True}}: processes would be dealt other samples than their own; leave "
                "it out"
            )
    for name in _REFUSED_ARGUMENTS:
        if options.get(name) is not None:
            raise UsageError(f"{name}: prompts and completions are those of `rollouts`; leave it out")
    if (evaluated := options.get("eval_dataset")) is not None:
        check_evaluation(args, _columns(evaluated), has_functions=bool(functions))
    if args.loss_type == "dr_grpo" and args.max_completion_length is None:
        raise UsageError(
            "GRPOConfig(loss_type='dr_grpo') divides by max_completion_length: set it, as to the run's --max-tokens"
        )


def check_evaluation(args: GRPOConfig, columns: Collection[str], *, has_functions: bool) -> None:
    """Prompts with these columns, whose completions TRL samples."""
    if not has_functions:
        raise UsageError("eval_dataset: TRL samples its completions, which have no stored reward: give reward_funcs")
    if args.max_completion_length is None:
        raise UsageError(
            "eval_dataset: without a max_completion_length its completions would be cut at transformers' default of 20 "
            "tokens: set it, as to the run's --max-tokens"
        )
    if ROLLOUTS in columns:
        raise UsageError(f"eval_dataset: its column {ROLLOUTS!r} would be taken for stored rollouts; rename it")


def check_names(names: Sequence[str], rewards: Sequence[str]) -> None:
    """A name of its own for each stored reward, among those of all reward functions as TRL has them."""
    if twice := [name for name in rewards if names.count(name) > 1]:
        raise UsageError(f"rewards: {twice[0]!r} is the name of two, which TRL would log as one; rename or drop one")


def check_batches(found: int, wanted: int) -> None:
    """As many batches of an epoch in each process as its generation batches make: or others would be trained on."""
    if found != wanted:
        raise UsageError(
            f"each process would be dealt {found:,} batches an epoch and not {wanted:,}: some samples would be used "
            "twice and others not at all; leave out what changes how data is loaded (accelerator_config, a "
            "get_train_dataloader of your own)"
        )


def _columns(dataset: Any) -> set[str]:
    """Of a dataset of TRL's, or of several by name."""
    several = dataset.values() if isinstance(dataset, dict) else [dataset]
    return {name for each in several for name in getattr(each, "column_names", None) or ()}


def check_groups(groups: Groups, args: GRPOConfig, incomplete: IncompleteGroups) -> None:
    """Every sample in a group, unless those that are in none are to be dropped; and a generation batch of groups."""
    if incomplete not in get_args(IncompleteGroups):
        raise UsageError(f'incomplete_groups={incomplete!r}: "raise" or "drop"')
    if not len(groups.samples) and not len(groups.left_out):
        raise UsageError("the dataset has no samples that are finished: `rollgen status` tells how its run stands")
    if len(groups.left_out) and incomplete == "raise":
        raise UsageError(
            f"{groups.uneven_prompts:,} prompts have a number of samples that num_generations={args.num_generations} "
            f"does not divide: {len(groups.left_out):,} samples would never be used; choose a divisor of the --n that "
            'they were made with, `rollgen generate --resume` what is missing, or pass incomplete_groups="drop"'
        )
    wanted = args.generation_batch_size // args.num_generations
    if len(groups.samples) < wanted:
        raise UsageError(
            f"{len(groups.samples):,} groups of num_generations={args.num_generations} samples do not fill a "
            f"generation batch of {wanted:,}: lower per_device_train_batch_size, gradient_accumulation_steps or "
            "num_generations"
        )


class Survey(NamedTuple):
    """Of samples that are handed out."""

    shortest_prompt: int
    longest_response: int
    all_messages: bool
    """Whether every prompt was given as messages."""
    fields: frozenset[str]
    """The names of all fields that some prompt's row has."""


def check_samples(index: Index, max_completion_length: int | None) -> Survey:
    """Lengths that TRL can take; reads four columns of every shard. Returns what was seen."""
    found = _survey(index)
    if found.shortest_prompt == 0:
        raise UsageError("a prompt is empty: no logits predict the first token of its completions")
    if max_completion_length is not None and found.longest_response > max_completion_length:
        raise UsageError(
            f"a completion has {found.longest_response:,} tokens, more than GRPOConfig(max_completion_length="
            f"{max_completion_length}): raise it, for nothing is cut"
        )
    return found


def _survey(index: Index) -> Survey:
    found = [_survey_rows(place, table) for place, table in _tables(index) if len(table)]
    return Survey(
        min(each.shortest_prompt for each in found),
        max(each.longest_response for each in found),
        all(each.all_messages for each in found),
        frozenset().union(*(each.fields for each in found)),
    )


def _survey_rows(place: str, table: pa.Table) -> Survey:
    prompts = table["prompt"].unique().to_pylist()
    return Survey(
        int(table["prompt_length"].to_numpy().min()),
        int(table["response_length"].to_numpy().max()),
        all(stored_messages(prompt) is not None for prompt in prompts),
        frozenset().union(*(fields_of(metadata, place) for metadata in table["metadata"].unique().to_pylist())),
    )


def _tables(index: Index) -> Iterator[tuple[str, pa.Table]]:
    """The rows that are handed out, a row group at a time, and where that is."""
    for _, members in groupby(range(len(index.groups)), key=lambda group: int(index.groups[group, 0])):
        groups = list(members)
        stored, _ = index.place(groups[0])
        with stored.part(_COLUMNS).open() as shard:
            for group in groups:
                _, number = index.place(group)
                table = read_row_group(shard, number, _COLUMNS, use_threads=False)
                yield f"{stored.place}: row group {number}", table.take(index.rows_of(group))


def check_model(trainer: GRPOTrainer, vocab_size: int, *, from_hidden: bool) -> None:
    """A language model with a logit for each id of a support; with `from_hidden`, of a head that allows that."""
    from accelerate import DistributedType  # which comes with TRL
    from accelerate.utils import is_peft_model

    model = trainer.accelerator.unwrap_model(trainer.model)
    if trainer._is_vlm:
        raise UsageError("the model takes images too, which rollouts do not have: load its language model alone")
    width = model.config.get_text_config().vocab_size
    if width < vocab_size:
        raise UsageError(
            f"the model's logits are {width:,} wide, the rollouts were sampled from {vocab_size:,} ids: another model?"
        )
    if from_hidden:
        if trainer.accelerator.distributed_type != DistributedType.NO:
            raise UsageError("from_hidden: only for one process, which holds the whole head; leave it out")
        if is_peft_model(model) or trainer.aux_loss_enabled:
            raise UsageError("from_hidden: not with PEFT or the auxiliary loss of a mixture of experts; leave it out")
        _check_head(model)


@torch.no_grad()
def _check_head(model: PreTrainedModel) -> None:
    """Logits that are the head times the last hidden states, by a forward pass of a few tokens."""
    ids = torch.arange(min(16, model.config.vocab_size), device=model.device).unsqueeze(0)
    head, was_training = model.get_output_embeddings(), model.training
    model.eval()
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    logits = model(input_ids=ids, use_cache=False).logits
    model.train(was_training)
    made = F.linear(hidden.to(head.weight.dtype), head.weight, head.bias).to(logits.dtype)
    tolerance = 4 * torch.finfo(logits.dtype).eps
    if not torch.allclose(made, logits, rtol=tolerance, atol=tolerance):
        raise UsageError(
            f"from_hidden: {model.config.model_type} scales, shifts or caps its logits after the head, which hidden "
            "states do not show; leave it out"
        )


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, dataset: StoredDataset) -> None:
    """Every id means the token that it meant when the rollouts were made, as far as can be told.

    That is by the hash, or by the vocabulary of the tokenizer in the dataset's directory, where that is shown to be the
    one that the manifest names. More tokens (for padding) are no other tokenizer.
    """
    if tokenizer_sha256(tokenizer) == dataset.manifest.tokenizer_sha256:
        return
    stored, given = _stored_vocabulary(dataset), tokenizer.get_vocab()
    if others := sum(given.get(token) != number for token, number in stored.items()):
        raise UsageError(
            f"{others:,} of {len(stored):,} ids are other tokens in the trainer's tokenizer than in that of the "
            f"rollouts ({dataset.directory / TOKENIZER_DIR}): train the model that sampled, or one of its vocabulary"
        )
    if not stored:
        _LOG.warning(
            "the tokenizer, of %s tokens, is not the one that the rollouts were made with, of %s, and there is none "
            "here to compare it with: ids may be other tokens",
            *(len(given), dataset.manifest.tokenizer_vocab_size),
        )


def _stored_vocabulary(dataset: StoredDataset) -> Mapping[str, int]:
    """Of the dataset's own tokenizer; empty where there is none that is the manifest's."""
    stored = stored_tokenizer(dataset.directory)
    if stored is None or stored.sha256 != dataset.manifest.tokenizer_sha256:
        return {}
    vocabulary: dict[str, int] = Tokenizer.from_str(stored.content.decode()).get_vocab(with_added_tokens=True)
    return vocabulary
