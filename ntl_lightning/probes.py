"""Trying a model out on small inputs, without a trace.

B batch, T positions, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

__all__ = ["CannotPack", "undisturbed", "verify_packing"]

# Examples of two packed rows, the first with two tokens of padding; by their lengths.
_PACKED = ((5, 3), (4, 6))
_UNCHANGED = 1e-6  # of the size of logits


class CannotPack(ValueError):
    """This model does not keep packed examples apart; the message says how it is known."""


def verify_packing(model: PreTrainedModel, num_tokens: int, device: torch.device) -> None:
    """Try out whether a model keeps the examples of a row apart and counts positions in each.

    Two rows of two examples are run as they are and with other token ids in the first example of a
    row: the logits of the one behind it must not change. Attention that is masked gives exactly
    zero, so even a slight influence tells, which fresh weights or bfloat16 would hide among
    rounding. What does change without a leak, as rounding in mixtures of experts may, changes the
    row beside too. That positions begin anew is seen by comparing with the same examples in rows of
    their own.

    Four forward passes without gradients, in evaluation mode and without autocast. Random state and
    the modes of all modules are as before. Under a sharded strategy all ranks must call it.

    Args:
        model: A causal language model.
        num_tokens: Token ids to draw from.
        device: Where it is.

    Raises:
        CannotPack: If logits depend on another example or differ from those of an example alone by
            more than rounding, or the model does not take `position_ids`.
    """
    generator = torch.Generator().manual_seed(0)
    width = max(map(sum, _PACKED))
    ids = torch.randint(num_tokens, (len(_PACKED), width), generator=generator)
    positions = torch.zeros_like(ids)
    alone = ids.new_zeros(sum(map(len, _PACKED)), max(map(max, _PACKED)))
    mask = torch.zeros_like(alone)
    places: list[tuple[int, slice]] = []
    for row, lengths in enumerate(_PACKED):
        end = 0
        for length in lengths:
            place = slice(end, end := end + length)
            positions[row, place] = torch.arange(length)
            alone[len(places), :length] = ids[row, place]
            mask[len(places), :length] = 1
            places.append((row, place))
    with undisturbed(model), torch.autocast(device.type, enabled=False):
        try:
            packed_logits, *changed_logits = (
                model(
                    input_ids=packed.to(device), position_ids=positions.to(device), use_cache=False
                ).logits
                for packed in (ids, *_with_other_first_examples(ids, num_tokens))
            )
        except Exception as error:
            raise CannotPack(
                f"it does not run on position_ids without attention_mask ({type(error).__name__}: "
                f"{error})"
            ) from error
        own_logits = model(
            input_ids=alone.to(device), attention_mask=mask.to(device), use_cache=False
        ).logits
    for row, (changed, lengths) in enumerate(zip(changed_logits, _PACKED, strict=True)):
        behind = slice(lengths[0], sum(lengths))
        change = (changed - packed_logits).float()
        influence, size = _largest(change[row, behind]), _largest(packed_logits[row, behind])
        rounding = _largest(torch.cat([change[:row], change[row + 1 :]]))
        if not influence <= max(_UNCHANGED * size, 4 * rounding):
            raise CannotPack(
                f"the logits of a packed example, up to {size:.3g} in size, change by "
                f"{influence:.3g} with the token ids of the example before it"
            )
    # Above what TensorFloat-32 rounds.
    tolerance = max(4 * torch.finfo(own_logits.dtype).eps, 1e-3)
    for number, (row, place) in enumerate(places):
        own = own_logits[number, : place.stop - place.start].float()
        packed = packed_logits[row, place].float()
        difference, size = _largest(packed - own), _largest(own)
        if not difference <= tolerance * size:
            raise CannotPack(
                f"the logits of packed examples, up to {size:.3g} in size, differ by "
                f"{difference:.3g} from those of the same examples in rows of their own"
            )


def _with_other_first_examples(ids: Tensor, num_tokens: int) -> Iterator[Tensor]:
    """For each row, the token ids with others in its first example."""
    for row, lengths in enumerate(_PACKED):
        changed = ids.clone()
        first = changed[row, : lengths[0]]
        first.add_(num_tokens // 2).remainder_(num_tokens)
        yield changed


def _largest(values: Tensor) -> float:
    return values.abs().max().item()


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """In evaluation mode, without gradients; modes and random states are put back."""
    modes = [(module, module.training) for module in model.modules()]
    gpus = {p.device for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(gpus)), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
