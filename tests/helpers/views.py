"""Tensors of the same values, laid out otherwise: transposed, strided, expanded, padded."""


def transposed(x):
    """The first two dimensions the other way round."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if x.dim() > 1 else strided(x)


def columns(x):
    """The last two dimensions the other way round."""
    return x.mT.contiguous().mT if x.dim() > 1 else strided(x)


def strided(x):
    """Every second element along each dimension of a larger tensor."""
    larger = x.new_full([2 * size for size in x.shape], 3)
    view = larger[tuple(slice(None, None, 2) for _ in x.shape)]
    return view.copy_(x)


def padded(x):
    """Rows with something behind them."""
    larger = x.new_full((*x.shape[:-1], x.shape[-1] + 5), 3)
    return larger[..., : x.shape[-1]].copy_(x)


def offset(x):
    """The second half of a larger tensor's features."""
    return x.new_full((*x.shape[:-1], 2 * x.shape[-1]), 3).chunk(2, -1)[1].copy_(x)


def expanded(x):
    """The first row, or element, for all."""
    return x[:1].expand_as(x)
