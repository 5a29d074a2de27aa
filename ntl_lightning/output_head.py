"""A model's hidden states and output matrix in place of its logits.

B batch, T positions, D hidden width, V vocabulary, r rank of a LoRA.
"""

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ntl_lightning.probes import undisturbed

__all__ = ["OutputHead", "Projection", "UnknownHead"]

# In the linear and in the saturated part of every soft cap; powers of two scale without rounding.
_SMALL, _LARGE = 2.0**-10, 2.0**40


class UnknownHead(ValueError):
    """This model's logits cannot be computed from its hidden states; the message says why."""


@dataclass(frozen=True)
class Projection:
    """What the logits are made of, while the weights are in place.

    logits = cap(scale * (hidden @ weight.T + bias + a @ b.T)), cap(x) = c * tanh(x / c).
    """

    hidden: Tensor
    """(B, T, D) input of the output head."""
    weight: Tensor
    """(V, D) its matrix, in the parameter's dtype."""
    bias: Tensor | None = None
    """(V,) or None."""
    low_rank: tuple[Tensor, Tensor] | None = None
    """(B, T, r) and (V, r) of a LoRA around the head, its scaling in the first; or None."""
    scale: float = 1.0
    """Factor behind the head."""
    soft_cap: float | None = None
    """c; None: no cap."""

    def without_first(self, positions: int) -> "Projection":
        """The same without the first positions."""
        if not positions:
            return self
        low_rank = self.low_rank and (self.low_rank[0][:, positions:], self.low_rank[1])
        return replace(self, hidden=self.hidden[:, positions:], low_rank=low_rank)

    def logits(self) -> Tensor:
        """(B, T, V) the logits, all of them."""
        scores = F.linear(self.hidden, self.weight, self.bias)
        if self.low_rank is not None:
            a, b = self.low_rank
            scores = (scores + F.linear(a, b)).to(scores.dtype)
        return self.behind_the_head(scores)

    def behind_the_head(self, scores: Tensor) -> Tensor:
        """(..., V) the head's output, scaled and capped."""
        scores = scores * self.scale
        if self.soft_cap is None:
            return scores
        return self.soft_cap * torch.tanh(scores / self.soft_cap)


class OutputHead:
    """Computes a loss inside the model's forward pass, where its output head would make logits.

    The head's `forward` is replaced for the length of one call. What surrounds it still runs: the
    layers, the norm and scaling before the head, `logits_to_keep`, and the hooks that gather
    sharded weights. The rest of the model sees logits of width 0.

    Args:
        model: A language model of transformers; may be sharded or hold LoRA layers of peft.

    Raises:
        UnknownHead: If the model or its head is compiled, or the head is no plain matrix product.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._head = _head_of(model)
        # BART and its relatives add a buffer to the head's output.
        self._bias_owner = next(
            (m for m in model.modules() if isinstance(_own_bias(m), Tensor)), None
        )
        self._scale = 1.0
        self._soft_cap: float | None = None

    def verify(self, **inputs: Any) -> None:
        """Learn what the model does behind its head, and compare with its own logits.

        Three forward passes without gradients, in evaluation mode. Random state and the modes of
        all modules are as before. Under a sharded strategy all ranks must call it.

        Args:
            **inputs: Of a small batch, as `loss` will get them.

        Raises:
            UnknownHead: If the logits are something else than a `Projection`, or the model does not
                run without them, or not at all.
        """
        with undisturbed(self._model):
            try:
                own = self._model(**inputs).logits
                self._scale, self._soft_cap = self._measure(own, inputs)
                ours, dtype = self._project(inputs)
            except UnknownHead:
                raise
            except Exception as error:
                raise UnknownHead(
                    f"it does not run as it should ({type(error).__name__}: {error})"
                ) from error
        if ours.shape != own.shape:
            raise UnknownHead(
                f"its logits have the shape {tuple(own.shape)}, the head's output "
                f"{tuple(ours.shape)}"
            )
        tolerance = max(4 * torch.finfo(dtype).eps, 1e-5)
        size = own.float().nan_to_num().abs().max().item()
        difference = (ours - own).float().nan_to_num().abs().max().item()
        if difference > tolerance * size or (ours.isnan() != own.isnan()).any():
            raise UnknownHead(
                f"its logits, up to {size:.3g} in size, differ by {difference:.3g} from hidden "
                "states times output matrix"
            )

    def loss(self, compute: Callable[[Projection], Tensor], **inputs: Any) -> Tensor:
        """Run the model up to its head, and `compute` there.

        Args:
            compute: From the projection to a loss (). The weights are whole while it runs.
            **inputs: Of the model.

        Returns:
            The loss (). Its backward pass starts at the model's output, as that of logits does, so
            that sharded weights are gathered in time.

        Raises:
            RuntimeError: If the model does not call its head exactly once.
        """
        losses: list[Tensor] = []
        owner = self._bias_owner
        added = None if owner is None else _own_bias(owner)

        def forward(hidden: Tensor) -> Tensor:
            losses.append(compute(self._projection(hidden, added)))
            # Nothing but an edge in the graph: gathering hooks wait at the outputs for a gradient.
            return hidden.new_zeros(*hidden.shape[:-1], 0) + losses[-1].to(hidden.dtype)

        with ExitStack() as stack:
            stack.enter_context(_attribute(self._head, "forward", forward))
            if owner is not None:
                stack.enter_context(_buffer(owner, _own_bias(owner)[..., :0]))
            output = self._model(**inputs)
        if len(losses) != 1:
            raise RuntimeError(
                f"the model has called its output head {len(losses)} times, not once"
            )
        return losses[0] + output.logits.sum()

    def _projection(self, hidden: Tensor, added: Tensor | None) -> Projection:
        weight, bias, low_rank = _matrices(self._head, hidden)
        if not all(type(t) in (Tensor, nn.Parameter) for t in (weight, bias) if t is not None):
            raise UnknownHead(f"its output matrix is a {type(weight).__name__}")
        if added is not None:
            added = added.flatten() / self._scale
            bias = added if bias is None else bias + added
        return Projection(hidden, weight, bias, low_rank, self._scale, self._soft_cap)

    def _project(self, inputs: dict[str, Any]) -> tuple[Tensor, torch.dtype]:
        """Our logits, and the dtype of the matrix product."""
        found: list[tuple[Tensor, torch.dtype]] = []

        def compute(projection: Projection) -> Tensor:
            product = F.linear(projection.hidden[:1, :1], projection.weight)
            found.append((projection.logits(), product.dtype))
            return product.new_zeros(())

        self.loss(compute, **inputs)
        return found[0]

    def _measure(self, own: Tensor, inputs: dict[str, Any]) -> tuple[float, float | None]:
        """Scale and soft cap, from what becomes of known numbers in place of the head's output."""
        known = torch.linspace(
            -20, 20, own.numel(), dtype=torch.promote_types(own.dtype, torch.float32)
        )
        known = known.view(own.shape).to(own.device)
        known[..., 0], known[..., 1] = _SMALL, _LARGE

        def forward(hidden: Tensor) -> Tensor:
            # Until the no_grad around the call ends: parameters behind the head become visible.
            torch.set_grad_enabled(True)
            return known.clone()

        with ExitStack() as stack, torch.no_grad():
            stack.enter_context(_attribute(self._head, "forward", forward))
            if self._bias_owner is not None:
                nothing = torch.zeros_like(_own_bias(self._bias_owner))
                stack.enter_context(_buffer(self._bias_owner, nothing))
            found = self._model(**inputs).logits
        if found.requires_grad:
            raise UnknownHead("it has trained parameters behind its output head")
        if found.shape != known.shape:
            raise UnknownHead(
                f"its logits have the shape {tuple(found.shape)}, its head's output "
                f"{tuple(known.shape)}"
            )
        small, large = found[0, 0, 0].item(), found[0, 0, 1].item()
        scale = small / _SMALL
        # Division and multiplication by a cap round.
        scale = 1.0 if math.isclose(scale, 1.0, rel_tol=1e-6) else scale
        soft_cap = None if math.isclose(large, scale * _LARGE, rel_tol=1e-3) else large
        if soft_cap is not None and not 0 < soft_cap < math.inf:
            raise UnknownHead("it does something else than scaling and soft capping behind it")
        expected = Projection(known, known, scale=scale, soft_cap=soft_cap).behind_the_head(known)
        if not torch.allclose(found.to(known.dtype), expected, rtol=1e-5, atol=1e-5):
            raise UnknownHead("it does something else than scaling and soft capping behind it")
        return scale, soft_cap


def _head_of(model: PreTrainedModel) -> nn.Module:
    """The module whose forward makes the logits."""
    head: Any = None
    with suppress(AttributeError, NotImplementedError):
        head = model.get_output_embeddings()
    if hasattr(head, "modules_to_save") and hasattr(head, "active_adapters"):
        # peft's copy of the head that is trained whole.
        names = [name for name in head.active_adapters if name in head.modules_to_save]
        head = head.modules_to_save[names[0]] if names else head.original_module
    if not isinstance(head, nn.Module):
        raise UnknownHead("it names no output head")
    for module in model.modules():
        compiled = module._compiled_call_impl is not None or hasattr(module, "_orig_mod")
        if compiled and any(part is head for part in module.modules()):
            raise UnknownHead("it is compiled, with its output head inside")
    if "forward" in vars(head) or not (_is_linear(head) or _is_lora(head)):
        raise UnknownHead(
            f"its output head, a {type(head).__name__}, is no plain linear layer or LoRA of one"
        )
    return head


def _is_linear(module: nn.Module) -> bool:
    # Sharding changes the class and keeps its forward; quantized layers have one of their own.
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _is_lora(module: nn.Module) -> bool:
    # Whoever has such a layer has loaded peft, which is no dependency here.
    lora = sys.modules.get("peft.tuners.lora.layer")
    return (
        lora is not None
        and isinstance(module, lora.Linear)
        and type(module).forward is lora.Linear.forward
        and _is_linear(module.base_layer)
    )


def _matrices(
    head: Any, hidden: Tensor
) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]:
    """Weight, bias and low-rank part of a linear layer or of a LoRA around one."""
    if _is_linear(head):
        return head.weight, head.bias, None
    weight, bias = head.base_layer.weight, head.base_layer.bias
    names = [name for name in head.active_adapters if name in head.lora_A]
    if head.disable_adapters or head.merged or not names:
        return weight, bias, None
    (name, *others) = names
    if others or name in head.lora_variant or head.lora_B[name].bias is not None:
        raise UnknownHead(
            "its output head has several LoRAs, or one of another kind than the plain one"
        )
    a = head.lora_A[name]
    narrow = a(head.lora_dropout[name](hidden.to(a.weight.dtype))) * head.scaling[name]
    return weight, bias, (narrow, head.lora_B[name].weight)


def _own_bias(module: nn.Module) -> Any:
    return dict(module.named_buffers(recurse=False)).get("final_logits_bias")


@contextmanager
def _attribute(module: nn.Module, name: str, value: object) -> Iterator[None]:
    """The module with an attribute of its own, which hides that of its class."""
    vars(module)[name] = value
    try:
        yield
    finally:
        del vars(module)[name]


@contextmanager
def _buffer(module: nn.Module, value: Tensor) -> Iterator[None]:
    """The module with another `final_logits_bias`."""
    kept = _own_bias(module)
    module.final_logits_bias = value
    try:
        yield
    finally:
        module.final_logits_bias = kept
