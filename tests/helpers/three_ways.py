"""Results and gradients of a loss three ways on the same values: ours, eager PyTorch in the same
dtype, and in float64.

How far off eager is, is partly luck where little is summed: in its dtype it may happen to hit the
truth. So eager is asked in several orders of tokens, columns and classes, and its worst answer
counts. N: tokens, H: hidden size, V: vocabulary.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from exactness import assert_no_worse, error
from kernel_forms import INTERPRETED
from torch import Tensor
from torch.nn.functional import cross_entropy as torch_cross_entropy
from torch.nn.functional import linear

from liger_patch.kernels import reference
from liger_patch.kernels.backend import accumulation_dtype
from liger_patch.kernels.cross_entropy import cross_entropy
from liger_patch.kernels.head.chunked import ALIGNED_V
from liger_patch.kernels.head.inputs import MIB
from liger_patch.kernels.linear_cross_entropy import linear_cross_entropy
from liger_patch.kernels.options import LossOptions

ORDERS = 4  # in which eager is asked
LOW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Kernels of losses and layers serve no float64: PyTorch computes it, interpreted or not
DTYPES = LOW_DTYPES if INTERPRETED else (*LOW_DTYPES, torch.float64)
Results = dict[str, Tensor | None]
ROW_OPTIONS = tuple(LossOptions.__dataclass_fields__)

# True stands for a tensor that fits the inputs, see `filled`
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 5.0},
    "logit_scale": {"logit_scale": 0.3},
    "label_smoothing": {"label_smoothing": 0.1},
    "z_loss": {"z_loss": 1e-2},
    "class_weight": {"class_weight": True},
    "class_weight_smoothing": {"class_weight": True, "label_smoothing": 0.3},
    "token_weight": {"token_weight": True},
    "items_int": {"num_items_in_batch": 5},
    "items_tensor": {"num_items_in_batch": True},
    "everything": {
        "softcap": 5.0,
        "logit_scale": 0.5,
        "label_smoothing": 0.1,
        "z_loss": 1e-2,
        "class_weight": True,
        "token_weight": True,
    },
}


def filled(
    options: Mapping[str, Any], tokens: int, vocab_size: int, device: torch.device
) -> dict[str, Any]:
    """The options with tensors in place of True; a fifth of the weights are zero."""
    generator = torch.Generator().manual_seed(tokens)
    tensors = {
        "class_weight": torch.rand(vocab_size, generator=generator) * 2,
        "token_weight": torch.rand(tokens, generator=generator) * 2,
        "num_items_in_batch": torch.tensor(7),
    }
    tensors["class_weight"][1::5] = 0
    tensors["token_weight"][1::5] = 0
    return {k: tensors[k].to(device) if v is True else v for k, v in options.items()}


def linear_inputs(
    dtype: torch.dtype,
    device: torch.device,
    tokens: int = 12,
    hidden_size: int = 40,
    vocab_size: int = 131,
    *,
    bias: bool = False,
    rank: int = 0,
    ignored: float = 0.3,
    ignore_index: int = -100,
) -> tuple[dict[str, Tensor], Tensor]:
    """Differentiable inputs by name, and labels (N,). With a rank, those of an adapter's product.

    About a third of the tokens point along their label's row of the weight, far enough that p -> 1.
    """
    generator = torch.Generator().manual_seed(tokens * hidden_size + vocab_size)
    hidden_states = torch.randn(tokens, hidden_size, generator=generator) * 2
    weight = torch.randn(vocab_size, hidden_size, generator=generator) / hidden_size**0.5
    labels = torch.randint(vocab_size, (tokens,), generator=generator)
    rows = weight[labels[::3]]
    hidden_states[::3] = 20 * rows / rows.square().sum(1, keepdim=True)
    labels[torch.rand(tokens, generator=generator) < ignored] = ignore_index
    inputs = {"hidden_states": hidden_states, "weight": weight}
    if bias:
        inputs["bias"] = torch.randn(vocab_size, generator=generator)
    if rank:
        inputs["low_rank"] = torch.randn(tokens, rank, generator=generator)
        inputs["low_rank_weight"] = torch.randn(vocab_size, rank, generator=generator) / rank
    return {name: value.to(device, dtype) for name, value in inputs.items()}, labels.to(device)


def logits_inputs(
    dtype: torch.dtype, device: torch.device, tokens: int = 12, vocab_size: int = 131, **how: Any
) -> tuple[Tensor, Tensor]:
    """Logits (N, V) with p -> 1 in about a third of the rows, and labels (N,)."""
    inputs, labels = linear_inputs(torch.float32, device, tokens, 40, vocab_size, **how)
    return linear(*inputs.values()).to(dtype), labels


def chunk_mib(rows: int, vocab_size: int, dtype: torch.dtype) -> float:
    """The budget that holds ``rows`` rows of logits."""
    return rows * -(-vocab_size // ALIGNED_V) * ALIGNED_V * dtype.itemsize / MIB


def eager_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    reduction: str = "mean",
    softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Tensor | None = None,
    token_weight: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """PyTorch's own cross entropy, of logits that are upcast to float32 as Transformers does."""
    z = logits.to(accumulation_dtype(logits.dtype)) * logit_scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    supervised = labels != -100
    class_weight = None if class_weight is None else class_weight.to(z.dtype)
    losses = torch_cross_entropy(
        z,
        labels,
        class_weight,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    if z_loss:
        losses = losses + z_loss * torch.where(supervised, torch.logsumexp(z, -1) ** 2, 0)
    weights = supervised.to(z.dtype) if token_weight is None else supervised * token_weight
    losses = losses * weights
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    if num_items_in_batch is not None:
        denominator = torch.as_tensor(num_items_in_batch, device=losses.device)
        return losses.sum() / torch.where(denominator == 0, 1, denominator)
    if class_weight is not None:
        denominator = (weights * class_weight[torch.where(supervised, labels, 0)]).sum()
    else:
        denominator = weights.sum()
    return losses.sum() / torch.where(denominator == 0, torch.inf, denominator)


def results_and_gradients(
    results_of: Callable[..., Any],
    inputs: Mapping[str, Tensor],
    upstream: Tensor | Mapping[str, Tensor] | None = None,
    frozen: Collection[str] = (),
    autocast: torch.dtype | None = None,
) -> Results:
    """The results by their names, or the loss, and each input's gradient by its name.

    Args:
        results_of: returns a loss, or a named tuple.
        upstream: gradients of results by their names, or that of the loss: 1 if not given.
        frozen: inputs without a gradient.
        autocast: the dtype of products in the forward pass.
    """
    leaves = {k: v.detach().requires_grad_(k not in frozen) for k, v in inputs.items()}
    device = next(iter(leaves.values())).device
    with torch.autocast(device.type, autocast, enabled=autocast is not None):
        found = results_of(**leaves)
    results = {"loss": found} if isinstance(found, Tensor) else found._asdict()
    if not isinstance(upstream, Mapping):
        upstream = {"loss": torch.ones_like(found) if upstream is None else upstream}
    pairs = [(results[name], u.to(results[name].dtype)) for name, u in upstream.items()]
    is_graph = any(leaf.requires_grad for leaf in leaves.values())
    assert all(result.requires_grad == is_graph for result, _ in pairs)
    if is_graph:
        torch.autograd.backward(*zip(*pairs, strict=True))
    detached = {k: None if v is None else v.detach() for k, v in results.items()}
    return detached | {name: leaf.grad for name, leaf in leaves.items()}


def paired(inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """The inputs with those of an adapter as the operator takes them."""
    pair = ("low_rank", "low_rank_weight")
    others: dict[str, Any] = {k: v for k, v in inputs.items() if k not in pair}
    return others | ({pair[0]: tuple(inputs[k] for k in pair)} if pair[0] in inputs else {})


def check_linear(
    inputs: Mapping[str, Tensor],
    labels: Tensor,
    *,
    upstream: Tensor | None = None,
    frozen: Collection[str] = (),
    chunk_mib: float | None = None,
    operator: Callable[..., Tensor] | None = None,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> Results:
    """Hold ``linear_cross_entropy`` to the rule; its loss and gradients are returned."""
    chunks = {} if chunk_mib is None else {"chunk_mib": chunk_mib}

    def ours(**x: Tensor) -> Tensor:
        return (operator or linear_cross_entropy)(**paired(x), labels=labels, **chunks, **options)

    def eager(order: int, **x: Tensor) -> Tensor:
        return _eager_in_order(*logits_in_order(order, **x), labels, options)

    def truth(**x: Tensor) -> Tensor:
        how = _for_reference(options)
        return reference.linear_cross_entropy(**paired(x), labels=labels.long(), **how)

    return _check(ours, eager, truth, inputs, upstream, frozen, autocast=autocast)


def check_logits(
    logits: Tensor, labels: Tensor, *, upstream: Tensor | None = None, **options: Any
) -> Results:
    """Hold ``cross_entropy`` to the rule, with float32's eps for its float32 loss."""

    def ours(logits: Tensor) -> Tensor:
        return cross_entropy(logits, labels, **options)

    def eager(order: int, logits: Tensor) -> Tensor:
        rows, classes = _orders(order, logits)
        return _eager_in_order(logits[rows][:, classes], rows, classes, labels, options)

    def truth(logits: Tensor) -> Tensor:
        return reference.cross_entropy(logits, labels.long(), **_for_reference(options))

    return _check(ours, eager, truth, {"logits": logits}, upstream, loss_dtype=torch.float32)


def _check(
    ours: Callable[..., Tensor],
    eager: Callable[..., Tensor],
    truth: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    upstream: Tensor | None,
    frozen: Collection[str] = (),
    *,
    loss_dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
) -> Results:
    our, worst, exact = three(ours, eager, truth, inputs, upstream, frozen, autocast)
    hold(our, worst, exact, autocast or dtype_of(inputs))
    if loss_dtype is not None:
        hold(*({"loss": way["loss"]} for way in (our, worst, exact)), loss_dtype, eps=4)
    return our


def three(
    ours: Callable[..., Any],
    eager: Callable[..., Any],  # of the number of an order, and inputs
    truth: Callable[..., Any],
    inputs: Mapping[str, Tensor],
    upstream: Any,
    frozen: Collection[str],
    autocast: torch.dtype | None = None,
) -> tuple[Results, Results, Results]:
    """Return ours, the worst of eager's, and the truth, as of ``results_and_gradients``."""
    before = {name: value.clone() for name, value in inputs.items()}
    our = results_and_gradients(ours, inputs, upstream, frozen, autocast)
    for name, value in inputs.items():
        gradient = our[name]
        assert gradient is None or (gradient.dtype, gradient.shape) == (value.dtype, value.shape)
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)
    exact_inputs = {name: value.double() for name, value in inputs.items()}
    exact = results_and_gradients(truth, exact_inputs, upstream, frozen)
    if dtype_of(inputs) == torch.float64:
        return our, exact, exact
    eagers = [
        results_and_gradients(partial(eager, order), inputs, upstream, frozen, autocast)
        for order in range(ORDERS)
    ]
    worst = {
        name: max((each[name] for each in eagers), key=partial(_off, value))
        for name, value in exact.items()
    }
    return our, worst, exact


def hold(our: Results, worst: Results, exact: Results, dtype: torch.dtype, eps: int = 1) -> None:
    """Hold ours to the rule; the truth itself is no better than ours in float64."""
    if dtype == torch.float64:
        torch.testing.assert_close(our, exact)
    else:
        assert_no_worse(our, worst, exact, dtype, eps=eps)


def dtype_of(inputs: Mapping[str, Tensor]) -> torch.dtype:
    return next(iter(inputs.values())).dtype


def _off(truth: Tensor | None, value: Tensor | None) -> float:
    if truth is None or value is None or truth.dtype == torch.bool:
        return 0.0
    return error(value, truth)


def _orders(order: int, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Orders of the rows and of the columns: number 0 leaves them as they are."""
    generator = torch.Generator().manual_seed(order)
    rows, columns = (
        torch.randperm(size, generator=generator) if order else torch.arange(size)
        for size in matrix.shape
    )
    return rows.to(matrix.device), columns.to(matrix.device)


def logits_in_order(
    order: int,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    low_rank: Tensor | None = None,
    low_rank_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits in an order of rows and classes, and these two; summed in an order of columns."""
    (rows, columns), (classes, _) = _orders(order, hidden_states), _orders(order, weight)
    bias = None if bias is None else bias[classes]
    logits = linear(hidden_states[rows][:, columns], weight[classes][:, columns], bias)
    if low_rank is not None and low_rank_weight is not None:
        logits = logits + linear(low_rank[rows], low_rank_weight[classes])
    return logits, rows, classes


def labels_in_order(labels: Tensor, classes: Tensor, ignore_index: int = -100) -> Tensor:
    """The places of labels among classes in this order; -100 where ignored."""
    ignored = labels.long() == ignore_index
    places = classes.argsort()[labels.long().masked_fill(ignored, 0)]
    return places.masked_fill(ignored, -100)


def _eager_in_order(
    logits: Tensor, rows: Tensor, classes: Tensor, labels: Tensor, options: Mapping[str, Any]
) -> Tensor:
    """Loss of logits that are in this order, with labels and options that are not."""
    options = dict(options)
    labels = labels_in_order(labels, classes, options.pop("ignore_index", -100))
    for name, index in (("class_weight", classes), ("token_weight", rows)):
        if options.get(name) is not None:
            options[name] = options[name][index]
    loss = eager_cross_entropy(logits, labels[rows], **options)
    return loss[rows.argsort()] if loss.dim() else loss


def _for_reference(options: Mapping[str, Any]) -> dict[str, Any]:
    row = {k: v for k, v in options.items() if k in ROW_OPTIONS}
    return {k: v for k, v in options.items() if k not in row} | {"options": LossOptions(**row)}
