"""Views of memory, checked and flattened."""

from __future__ import annotations


def flat(view: memoryview) -> memoryview:
    """`view` as a one-dimensional view of its bytes.

    Raises:
        ValueError: `view` is not C-contiguous.
    """
    if view.ndim == 1 and view.format == "B" and view.contiguous:
        return view
    if not view.c_contiguous:
        raise ValueError("a body must be C-contiguous")
    return view.cast("B") if view.nbytes else memoryview(b"")


def target_of(target: memoryview, size: int) -> memoryview:
    """`target` flattened, ready to receive `size` bytes.

    Raises:
        ValueError: it is read-only or has another size.
    """
    if target.nbytes != size:
        raise ValueError(f"the target has {target.nbytes} bytes; the body has {size}")
    if size and target.readonly:
        raise ValueError("the target is read-only")
    return flat(target)
