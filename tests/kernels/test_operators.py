"""What all operators have in common: every row of ``operators`` has every property."""

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel_forms import INTERPRETED
from operators import (
    EVERYTHING,
    OPERATORS,
    Operator,
    as_tuple,
    columns,
    expanded,
    offset,
    padded,
    strided,
    transposed,
    upstream_of,
)
from slow_cases import slow_but
from three_ways import LOW_DTYPES
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

contiguous = Tensor.contiguous
VIEWS = [transposed, columns, strided, padded, offset, expanded]
every_operator = pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)


def names_of(operator: Operator) -> list[str]:
    return operator.trainable(operator.made(1))


def separately(operator: Operator) -> list[tuple[str, ...]]:
    """Each tensor, or of many those beside the first together."""
    first, *others = operator.made(1)
    each = [(name,) for name in others] if len(others) < 7 else [tuple(others)]
    return [(first,), *each, (first, *others)]


def wanted_of(operator: Operator) -> list[str]:
    """Each name alone, what the row adds, and all but one."""
    names = [name.replace(".", r"\.") for name in names_of(operator)]
    others = [rf"(?!{name}$).*" for name in names] if len(names) > 1 else []
    return [*names, *operator.wanted, *others]


def of_each(values: Any, quick: Any = None) -> Any:
    """Parameters: every operator with each of its values, slow but for the quick ones."""
    return [
        pytest.param(
            operator,
            value,
            id=f"{name}-{value}",
            marks=[] if quick is None or value in quick(operator) else [pytest.mark.slow],
        )
        for name, operator in OPERATORS.items()
        for value in values(operator)
    ]


def telling(operator: Operator) -> list[str]:
    """Of ``wanted_of``, what a quick run takes: of many names the first and the last."""
    names = [name.replace(".", r"\.") for name in names_of(operator)]
    all_names = len(names) < (3 if INTERPRETED else 5)
    return [*(names if all_names else [names[0], names[-1]]), *operator.wanted]


def dtypes_of(operator: Operator) -> list[torch.dtype]:
    """Also float64, which no kernel serves: the interpreter would compute as PyTorch does."""
    return [operator.dtype] if INTERPRETED else [operator.dtype, torch.float64]


OF_EACH_DTYPE = [(40, dtype) for dtype in (*LOW_DTYPES, torch.float64)]
IN_FLOAT16 = [(40, torch.float16), (0, torch.float16)]  # which Triton's interpreter multiplies


@every_operator
@pytest.mark.parametrize(
    ("tokens", "dtype"),
    slow_but([*OF_EACH_DTYPE, IN_FLOAT16[1]], [*OF_EACH_DTYPE, IN_FLOAT16[1]], IN_FLOAT16),
    ids=str,
)
def test_no_worse_than_eager(operator, dtype, tokens, device):
    operator.check(operator.tensors(device, dtype, tokens))


def strides() -> Iterator[Any]:
    """Quick: all tensors in two views, and the first alone in a third."""
    for row, operator in OPERATORS.items():
        each = separately(operator)
        for names, view in itertools.product(each, VIEWS):
            together = (strided, padded if INTERPRETED else expanded)
            is_first = names == each[0] and view is transposed
            is_quick = is_first or (names == each[-1] and view in together)
            marks = () if is_quick else pytest.mark.slow
            name = f"{row}-{names}-{view.__name__}"
            yield pytest.param(operator, names, view, id=name, marks=marks)


@pytest.mark.parametrize(("operator", "names", "view"), [*strides()])
def test_inputs_of_any_strides(operator, names, view, device):
    for dtype in dtypes_of(operator):
        tensors = operator.tensors(device, dtype)
        operator.check(tensors | {name: view(tensors[name]) for name in names})


@every_operator
@pytest.mark.parametrize(
    "view",
    slow_but([strided, expanded, padded], [transposed, strided, expanded, padded], [padded]),
)
def test_upstream_gradients_of_any_strides(operator, view, device):
    operator.check(operator.tensors(device), view=view)


@every_operator
@pytest.mark.parametrize("view", slow_but([strided], [contiguous, *VIEWS[:3]]))
@pytest.mark.parametrize(
    "given", slow_but([contiguous, transposed], [contiguous, transposed], interpreted=[contiguous])
)
def test_saved_tensors_of_any_strides(operator, given, view, device):
    """As hooks that offload them give them back."""
    tensors = operator.tensors(device)
    first = next(iter(tensors))
    tensors[first] = given(tensors[first])
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, view):
        operator.check(tensors)


@pytest.mark.parametrize(("operator", "wanted"), of_each(wanted_of, quick=telling))
def test_only_the_gradients_that_are_wanted(operator, wanted, device):
    for dtype in dtypes_of(operator):
        operator.check(operator.tensors(device, dtype), wanted)


@every_operator
def test_results_without_gradients(operator, device):
    tensors = operator.tensors(device)
    expected = operator.run(tensors)[1]
    found = [as_tuple(operator.call(**tensors))]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found.append(operator.run(tensors)[1])
    for results in found:
        assert not any(each.requires_grad for each in results)
        assert all(map(torch.equal, results, expected))


@every_operator
@pytest.mark.parametrize("dtype", slow_but([torch.float16], LOW_DTYPES), ids=str)
def test_twice_the_same_bits(operator, dtype, quick_device):
    tensors = operator.tensors(quick_device, dtype)
    assert all(map(torch.equal, *(operator.gradients(tensors) for _ in range(2))))


@every_operator
@pytest.mark.parametrize("dtype", slow_but([torch.float16], LOW_DTYPES), ids=str)
def test_backward_passes_over_one_graph_give_the_same_bits(operator, dtype, device):
    """And write over nothing that is kept or given."""
    tensors = operator.tensors(device, dtype)
    before = {name: value.clone() for name, value in tensors.items()}
    first = re.escape(next(iter(tensors)))
    number = 1 if INTERPRETED else 2 * len(names_of(operator)) - 1
    for wanted in (EVERYTHING, first, rf"(?!{first}$).*")[:number]:
        leaves, results = operator.run(tensors, wanted)
        results = [each for each in results if each.requires_grad]
        # powers of 2: the first pass may scale gradients of the forward pass
        upstream = [torch.exp2(each.round()) for each in upstream_of(results)]
        kept = [each.clone() for each in upstream]
        runs = [
            torch.autograd.grad(results, leaves, upstream, retain_graph=keep)
            for keep in (True, False)
        ]
        assert all(map(torch.equal, *runs))
        assert all(map(torch.equal, upstream, kept))
        assert all(map(torch.equal, tensors.values(), before.values()))
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(results, leaves, upstream)


@every_operator
def test_a_second_derivative_is_refused(operator, quick_device):
    tensors = operator.tensors(quick_device, torch.float32)
    for wanted in (EVERYTHING, *wanted_of(operator)):
        number = len(operator.run(tensors, wanted)[1])
        for i in range(number):
            leaves, results = operator.run(tensors, wanted)
            if not results[i].requires_grad:  # of other projections
                continue
            with pytest.raises(RuntimeError, match=f"{operator.name} has no second derivative"):
                torch.autograd.grad(results[i].sum(), leaves, create_graph=True, allow_unused=True)


@every_operator
@pytest.mark.parametrize("view", slow_but([contiguous], [contiguous, transposed, padded]))
def test_results_may_be_written_to(operator, view, quick_device):
    tensors = operator.tensors(quick_device, torch.float32)
    first = next(iter(tensors))
    tensors[first] = view(tensors[first])
    _, results = operator.run(tensors)
    for i in range(len(results)):
        gradients = []
        for in_place in (True, False):
            leaves, results = operator.run(tensors)
            results = list(results)
            results[i] = results[i].mul_(2.0) if in_place else 2.0 * results[i]
            gradients.append(torch.autograd.grad(results, leaves, upstream_of(results)))
        assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("is_second", [False, True])
@pytest.mark.parametrize(("operator", "name"), of_each(lambda operator: operator.made(1)))
def test_an_input_that_changes_before_the_backward_pass(operator, name, is_second, quick_device):
    """Is an error, or its former values count."""
    tensors = operator.tensors(quick_device, torch.float32)
    expected = operator.gradients(tensors)
    leaves, results = operator.run(tensors)
    if is_second:
        torch.autograd.grad(results, leaves, upstream_of(results), retain_graph=True)
    with torch.no_grad():
        tensors[name].mul_(2)
    try:
        gradients = torch.autograd.grad(results, leaves, upstream_of(results))
    except RuntimeError as error:
        if re.search("in ?place", str(error)) is None:
            raise
    else:
        assert all(map(torch.equal, gradients, expected[len(results) :]))


@every_operator
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_give_the_same_bits(operator, reentrant, quick_device):
    """Of a first layer, too, whose input takes no gradient: reentrant ones want one that does."""
    tensors = operator.tensors(quick_device)
    first, *others = operator.trainable(tensors)

    def call(*values: Tensor) -> Any:
        return operator.call(**dict(zip(tensors, values, strict=True)))

    for names in ([first, *others], others)[: 1 if reentrant or not others else 2]:
        wanted = "|".join(map(re.escape, names))
        expected = operator.gradients(tensors, wanted)
        leaves = {n: v.detach().requires_grad_(n in names) for n, v in tensors.items()}
        results = as_tuple(checkpoint(call, *leaves.values(), use_reentrant=reentrant))
        torch.autograd.backward(results, upstream_of(results))
        found = [*results, *(leaves[name].grad for name in leaves if name in names)]
        assert all(map(torch.equal, found, expected))


LOSSES = {name: operator for name, operator in OPERATORS.items() if "labels" in operator.fixed}
every_loss = pytest.mark.parametrize("operator", LOSSES.values(), ids=LOSSES)


@every_loss
@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize("dtype", slow_but(LOW_DTYPES, LOW_DTYPES, [torch.float16]), ids=str)
def test_all_labels_ignored_gives_zero(operator, tokens, dtype, device):
    tensors = operator.tensors(device, dtype, tokens)
    tensors["labels"].fill_(-100)
    for wanted in (EVERYTHING, next(iter(tensors))):  # of a frozen head, too
        operator.check(tensors, wanted)
        assert not any(each.any() for each in operator.gradients(tensors, wanted))


@every_loss
def test_what_is_in_an_ignored_token_reaches_nothing(operator, device):
    tensors = operator.tensors(device, torch.float32, 5)
    tensors["labels"][3], tensors["labels"][:3] = -100, 7
    expected = operator.gradients(tensors)
    for name in ("hidden_states", "logits", "low_rank", "student_hidden", "teacher_hidden"):
        if name in tensors:
            tensors[name][3] = torch.nan
    assert all(map(torch.equal, operator.gradients(tensors), expected))


@every_operator
def test_a_backward_pass_under_autocast_has_the_dtype_of_the_forward_pass(operator, quick_device):
    tensors = operator.tensors(quick_device, torch.float32)
    leaves, results = operator.run(tensors)
    with torch.autocast(quick_device.type, torch.bfloat16):
        gradients = torch.autograd.grad(results, leaves, upstream_of(results))
    assert all(map(torch.equal, [*results, *gradients], operator.gradients(tensors)))


@every_operator
def test_tensors_without_values_give_shapes(operator):
    """On a device without autocast and memory."""
    expected = operator.gradients(operator.tensors("cpu", torch.bfloat16))
    found = operator.gradients(operator.tensors("meta", torch.bfloat16))
    for ours, each in zip(found, expected, strict=True):
        assert (ours.shape, ours.dtype, ours.device.type) == (each.shape, each.dtype, "meta")


RECORDED = {name: operator for name, operator in OPERATORS.items() if operator.records}
recorded_operators = pytest.mark.parametrize("operator", RECORDED.values(), ids=RECORDED)


class Called(nn.Module):
    """The module of a function, which torch.export wants."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Tensor) -> Any:
        return self.function(*values)


RECORDERS: dict[str, Callable[..., Callable[..., Any]]] = {
    "make_fx": lambda function, values: make_fx(function)(*values),
    "jit": lambda function, values: torch.jit.trace(function, values),
    "export": lambda function, values: torch.export.export(
        Called(function), values, strict=False
    ).module(),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")  # sizes are compared
@pytest.mark.filterwarnings("ignore:.*get_attr")  # torch 2.6
@pytest.mark.parametrize("recorder", RECORDERS)
@recorded_operators
def test_a_recorded_forward_pass_has_the_gradients_of_the_call(operator, recorder, quick_device):
    recorded, given = (operator.tensors(quick_device, torch.float32) for _ in range(2))

    def function(*values: Tensor) -> Any:
        return operator.call(**dict(zip(given, values, strict=True)))

    def gradients(call: Callable[..., Any]) -> list[Tensor]:
        results = as_tuple(call(*given.values()))
        return [*results, *torch.autograd.grad(results, leaves, upstream_of(results))]

    traced = RECORDERS[recorder](function, tuple(recorded.values()))
    leaves = [given[name].requires_grad_() for name in operator.trainable(given)]
    torch.testing.assert_close(gradients(traced), gradients(function))


@recorded_operators
def test_traces_hold_operators_with_their_gradients(operator, quick_device):
    """Not what a kernel's launcher does around a launch, which no trace sees."""
    recorded, given = (operator.tensors(quick_device, torch.float32) for _ in range(2))

    def gradients(*values: Tensor) -> tuple[Tensor, ...]:
        tensors = dict(zip(given, values, strict=True))
        leaves = [tensors[name].requires_grad_() for name in operator.trainable(tensors)]
        total = sum(each.square().sum() for each in as_tuple(operator.call(**tensors)))
        return torch.autograd.grad(total, leaves)

    traced = make_fx(gradients)(*recorded.values())
    name = "rotate" if operator.name == "rotary" else operator.name
    assert sum(node.name.startswith(name) for node in traced.graph.nodes) == 2
    leaves = [given[name].requires_grad_() for name in operator.trainable(given)]
    found = traced(*given.values())
    torch.testing.assert_close(found, gradients(*given.values()))
    total = sum(each.square().sum() for each in found)
    if operator.name == "rotary":  # linear, so its backward pass is an operator with a gradient too
        tables = [given[name] for name in operator.fixed]
        again = gradients(*(each.detach() for each in found), *tables)
        expected = [2 * each for each in again]
        torch.testing.assert_close(list(torch.autograd.grad(total, leaves)), expected)
    else:
        with pytest.raises(RuntimeError, match="no autograd formula"):
            torch.autograd.grad(total, leaves)


@recorded_operators
def test_operators_run_on_tensors_without_values(operator, quick_device):
    tensors = operator.tensors(quick_device)
    with FakeTensorMode() as mode:
        found = operator.gradients({n: mode.from_tensor(value) for n, value in tensors.items()})
    for ours, expected in zip(found, operator.gradients(tensors), strict=True):
        assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype)
        assert ours.stride() == expected.stride()
