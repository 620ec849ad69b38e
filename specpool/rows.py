"""Rows: what a pool's storage is to a mover, whatever the pool is for.

A ``Rows`` says where the bytes of every slot lie in one tensor:

    address(slot) = base + (slot // page_size) * page_stride + (slot % page_size) * token_stride

A flat buffer is one ``Rows``; a head-major page is one per head; a page that packs payloads and
then scales is one per part. Layouts are declared, never guessed from a shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

LAYOUTS = ("nhd", "hnd", "page_split")
_LIMIT = 2**31


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of ``width`` bytes, one a slot, in the memory of ``tensor``.

    Args:
        tensor: the tensor that owns the bytes; any dtype, any device, kept alive by this object.
        offset: bytes from ``tensor.data_ptr()`` to the row of slot 0.
        width: bytes a row.
        slots: rows there are; a multiple of ``page_size``.
        token_stride: bytes from one slot to the next in a page; at least ``width``.
        page_size: slots a page; 1 for a flat buffer.
        page_stride: bytes from one page to the next; ``page_size * token_stride`` when not given.
        mapping: int64 ``[n]`` on the tensor's device, contiguous: a loc's row is
            ``mapping[loc]``; an entry of 0 or less means that the loc has no row here, and
            entries above 0 differ (two locs that share a row are one target given twice).
        name: what messages call these rows.

    Raises:
        ValueError: the geometry leaves the tensor, rows overlap their neighbours, slots do not
            fill pages, or the mapping is not as described.
    """

    tensor: torch.Tensor = field(repr=False)
    offset: int
    width: int
    slots: int
    token_stride: int
    page_size: int = 1
    page_stride: int = 0
    mapping: torch.Tensor | None = field(default=None, repr=False)
    name: str = "rows"
    _strides: tuple[int, ...] = field(default=(), init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_strides", _strides(self.tensor))
        if not self.page_stride:
            object.__setattr__(self, "page_stride", self.page_size * self.token_stride)
        if self.page_size == 1:  # a page is a token: one stride says it all
            object.__setattr__(self, "token_stride", self.page_stride)
        if min(self.width, self.slots, self.page_size) < 1 or self.offset < 0:
            raise ValueError(
                f"{self.name}: width {self.width}, slots {self.slots} and page_size "
                f"{self.page_size} must be at least 1, offset {self.offset} at least 0"
            )
        if self.slots % self.page_size:
            raise ValueError(
                f"{self.name}: {self.slots} slots do not fill pages of {self.page_size}; "
                "make the slots a multiple of page_size"
            )
        if self.page_size > 1 and self.token_stride < self.width:
            raise ValueError(
                f"{self.name}: a token stride of {self.token_stride} bytes is below the row's "
                f"width of {self.width}: neighbouring rows would share bytes"
            )
        if self.pages > 1 and self.page_stride < self.page_span:
            raise ValueError(
                f"{self.name}: a page stride of {self.page_stride} bytes is below the "
                f"{self.page_span} bytes that the rows of a page take"
            )
        if max(self.slots, self.token_stride, self.page_stride) >= _LIMIT:
            raise ValueError(f"{self.name}: slots and strides must stay below 2^31, got {self}")
        if self.end > self.address + _span(self.tensor) - self.offset:
            raise ValueError(
                f"{self.name}: the rows end {self.end - self.tensor.data_ptr()} bytes into a "
                f"tensor of {_span(self.tensor)} bytes"
            )
        self.check_memory()

    def _check_mapping(self) -> None:
        mapping = self.mapping
        if mapping is None:
            return
        if (
            mapping.dtype != torch.int64
            or mapping.dim() != 1
            or mapping.numel() == 0
            or not mapping.is_contiguous()
            or mapping.device != self.tensor.device
        ):
            raise ValueError(
                f"{self.name}: a mapping is a contiguous int64 [n] tensor with entries on "
                f"{self.tensor.device}, got {mapping.dtype} {list(mapping.shape)} on "
                f"{mapping.device}"
            )
        held = mapping.untyped_storage().nbytes()
        if (mapping.storage_offset() + mapping.numel()) * 8 > held:
            raise RuntimeError(
                f"{self.name}: the mapping's memory was freed or shrunk to {held} bytes; build the "
                "mover again over a mapping that holds its entries"
            )

    @property
    def address(self) -> int:
        """Address of the row of slot 0."""
        return self.tensor.data_ptr() + self.offset

    @property
    def start(self) -> int:
        """Bytes from the start of the tensor's storage to the row of slot 0."""
        return int(self.tensor.storage_offset()) * self.tensor.element_size() + self.offset

    @property
    def pages(self) -> int:
        """Pages that the slots fill."""
        return self.slots // self.page_size

    @property
    def page_span(self) -> int:
        """Bytes from a page's first row to the end of its last."""
        return (self.page_size - 1) * self.token_stride + self.width

    @property
    def end(self) -> int:
        """Address behind the last row."""
        return self.address + (self.pages - 1) * self.page_stride + self.page_span

    @property
    def page_gap(self) -> int:
        """``page_stride - page_size * token_stride``; 0 means that the pages are one flat run."""
        return self.page_stride - self.page_size * self.token_stride

    @property
    def loc_limit(self) -> int:
        """Locs at and above this have no row: the mapping's length, or the slots."""
        return self.slots if self.mapping is None else self.mapping.numel()

    def check_memory(self) -> None:
        """Refuse rows whose tensor no longer holds them, or whose mapping no longer is one.

        Raises:
            RuntimeError: the storage of the tensor or of the mapping was freed or shrunk, or the
                tensor was given other strides.
            ValueError: the mapping is not as described.
        """
        self._check_mapping()
        held = self.tensor.untyped_storage().nbytes()
        if self.start + self.end - self.address > held:
            raise RuntimeError(
                f"{self.name}: the tensor's memory was freed or shrunk to {held} bytes; build the "
                "mover again over tensors that hold their rows"
            )
        if _strides(self.tensor) != self._strides:
            raise RuntimeError(
                f"{self.name}: the tensor now has strides {list(self.tensor.stride())}, which are "
                "not those its rows were declared with; build the mover again over it"
            )

    def view(self) -> torch.Tensor:
        """The rows as uint8 ``[pages, page_size, width]``, sharing the tensor's memory.

        A geometry without gaps between its pages comes as ``[slots, 1, width]``.
        """
        storage = self.tensor.untyped_storage()
        flat = self.page_gap == 0
        pages, page_size = (self.slots, 1) if flat else (self.pages, self.page_size)
        page_stride = self.token_stride if flat else self.page_stride
        empty = torch.empty(0, dtype=torch.uint8, device=self.tensor.device)
        return empty.set_(
            storage, self.start, (pages, page_size, self.width), (page_stride, self.token_stride, 1)
        )


def rows_from(
    tensor: torch.Tensor,
    layout: str = "nhd",
    *,
    page_size: int | None = None,
    widths: Sequence[int] | None = None,
    mapping: torch.Tensor | None = None,
    name: str = "tensor",
) -> list[Rows]:
    """The rows of ``tensor`` in a declared layout.

    Args:
        tensor: the storage, on any device, of any dtype. By layout:
            ``"nhd"``: ``[slots, ...]``; a slot's row is ``tensor[slot]``, whose dimensions must be
            dense. The first dimension's stride is free.
            ``"hnd"``: ``[pages, heads, page_size, dim]``; a slot owns one run of ``dim`` a head.
            The last dimension must be dense. K and V in one tensor are heads of it, and so are
            padded heads without pages: ``tensor[:, :, None]``.
            ``"page_split"``: ``[pages, page_bytes]`` (in bytes whatever the dtype); a page holds
            ``page_size`` runs of ``widths[0]`` bytes, then ``page_size`` of ``widths[1]``, and so
            on, then padding.
        page_size: slots a page; needed for ``"page_split"``, checked for ``"hnd"``.
        widths: bytes a slot has in each part of a ``"page_split"`` page.
        mapping: see ``Rows``.
        name: what messages call the tensor.

    Returns:
        One ``Rows`` for ``"nhd"``, one a head for ``"hnd"``, one a part for ``"page_split"``.

    Raises:
        TypeError: ``tensor`` is no strided tensor.
        ValueError: an unknown layout, or a tensor that is not what its layout says.

    Example:
        >>> pages = torch.zeros(4, 64 * 584, dtype=torch.uint8)
        >>> [(r.offset, r.width) for r in rows_from(pages, "page_split", page_size=64,
        ...                                         widths=(576, 8))]
        [(0, 576), (36864, 8)]
    """
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        got = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"{name}: rows need a strided torch.Tensor, got {got}")
    if widths is not None and layout != "page_split":
        raise ValueError(f"{name}: widths describe 'page_split' pages, not {layout!r}")
    if page_size is not None and layout == "nhd":
        raise ValueError(f"{name}: 'nhd' has no pages; leave page_size out")
    if layout == "nhd":
        return [_nhd(tensor, mapping, name)]
    if layout == "hnd":
        return _hnd(tensor, page_size, mapping, name)
    if layout == "page_split":
        return _page_split(tensor, page_size, widths, mapping, name)
    raise ValueError(f"{name}: unknown layout {layout!r}; layouts are {', '.join(LAYOUTS)}")


def _nhd(tensor: torch.Tensor, mapping: torch.Tensor | None, name: str) -> Rows:
    if tensor.dim() < 1 or tensor.numel() == 0:
        raise ValueError(f"{name}: 'nhd' needs [slots, ...] with slots, got {list(tensor.shape)}")
    item = tensor.element_size()
    width = prod(tensor.shape[1:]) * item
    if not _dense(tensor, 1):
        raise ValueError(
            f"{name}: a slot's row must be dense in 'nhd', got shape {list(tensor.shape)} with "
            f"strides {list(tensor.stride())}"
        )
    stride = tensor.stride(0) * item if tensor.shape[0] > 1 else width
    if stride < width:
        raise ValueError(
            f"{name}: a slot stride of {stride} bytes is below the row's width of {width}: "
            "neighbouring rows would share bytes"
        )
    return Rows(tensor, 0, width, tensor.shape[0], stride, mapping=mapping, name=name)


def _hnd(
    tensor: torch.Tensor, page_size: int | None, mapping: torch.Tensor | None, name: str
) -> list[Rows]:
    if tensor.dim() != 4 or tensor.numel() == 0:
        raise ValueError(
            f"{name}: 'hnd' needs [pages, heads, page_size, dim], got {list(tensor.shape)}"
        )
    pages, heads, size, dim = tensor.shape
    if page_size is not None and page_size != size:
        raise ValueError(
            f"{name}: pages of {page_size} slots do not fit {list(tensor.shape)}, whose third "
            f"dimension holds {size}"
        )
    if not _dense(tensor, 3):
        raise ValueError(f"{name}: the last dimension must be dense in 'hnd'")
    item = tensor.element_size()
    _, head, token, _ = (stride * item for stride in tensor.stride())
    return [
        Rows(
            tensor,
            offset=h * head,
            width=dim * item,
            slots=pages * size,
            token_stride=token if size > 1 else dim * item,
            page_size=size,
            page_stride=_page_stride(tensor, name) if pages > 1 else 0,
            mapping=mapping,
            name=f"{name}, head {h}",
        )
        for h in range(heads)
    ]


def _page_split(
    tensor: torch.Tensor,
    page_size: int | None,
    widths: Sequence[int] | None,
    mapping: torch.Tensor | None,
    name: str,
) -> list[Rows]:
    if page_size is None or page_size < 1 or not widths or min(widths) < 1:
        raise ValueError(
            f"{name}: 'page_split' needs page_size and widths of at least 1, got {page_size} and "
            f"{widths}"
        )
    if tensor.dim() != 2 or tensor.numel() == 0 or not _dense(tensor, 1):
        raise ValueError(
            f"{name}: 'page_split' needs dense [pages, page_bytes], got {list(tensor.shape)} with "
            f"strides {list(tensor.stride())}"
        )
    item = tensor.element_size()
    page_bytes = tensor.shape[1] * item
    if page_size * sum(widths) > page_bytes:
        raise ValueError(
            f"{name}: {page_size} slots of {tuple(widths)} bytes need {page_size * sum(widths)} "
            f"bytes a page, the tensor has {page_bytes}"
        )
    parts, offset = [], 0
    for part, width in enumerate(widths):
        parts.append(
            Rows(
                tensor,
                offset=offset,
                width=width,
                slots=tensor.shape[0] * page_size,
                token_stride=width,
                page_size=page_size,
                page_stride=_page_stride(tensor, name) if tensor.shape[0] > 1 else page_bytes,
                mapping=mapping,
                name=f"{name}, part {part}",
            )
        )
        offset += page_size * width
    return parts


def _page_stride(tensor: torch.Tensor, name: str) -> int:
    """Bytes from one of several pages to the next."""
    stride = tensor.stride(0) * tensor.element_size()
    if not stride:
        raise ValueError(f"{name}: a page stride of 0 bytes: all pages would share their bytes")
    return stride


def _dense(tensor: torch.Tensor, first: int) -> bool:
    """Whether the dimensions from ``first`` on lie as in a contiguous tensor."""
    expected = 1
    for size, stride in zip(
        reversed(tensor.shape[first:]), reversed(tensor.stride()[first:]), strict=True
    ):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of the dimensions that are stepped along."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tuple(stride for size, stride in sizes if size > 1)


def _span(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    steps = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (steps + 1) * tensor.element_size()
