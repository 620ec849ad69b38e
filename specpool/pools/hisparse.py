"""DeepSeek-V4's compressed single KV behind a mapping: a loc's slot here is ``mapping[loc]``.

The engine owns the mapping and changes its entries in place; 0 and less mean that a loc has no slot
on the device now. Setters, host copies and moves take locs and translate them: a store without a
slot goes to the dummy slot 0, a move skips it, a host copy refuses it.
"""

from __future__ import annotations

import weakref

import torch

from specpool.pools.addresses import address_tensor
from specpool.pools.deepseek_v4 import WIDTHS, DeepSeekV4SingleKVPool
from specpool.pools.store import HasLoc, check_device, check_range, slots_of, within
from specpool.rows import Rows


class HiSparseC4DevicePool(DeepSeekV4SingleKVPool):
    """A ``DeepSeekV4SingleKVPool`` addressed by compressed locs, one for each 4 tokens.

    ``register_mapping`` comes first; a store, a move or a host copy before it raises RuntimeError.
    """

    compress_ratio = 4
    full_to_hisparse_device_index_mapping: torch.Tensor | None = None

    def register_mapping(self, full_to_hisparse_device_index_mapping: torch.Tensor) -> None:
        """Set the mapping: contiguous int64 ``[n]`` on the pool's device, compressed loc -> slot.

        Entries may change in place at any time; a tensor registered later takes this one's place.
        A weak proxy, which SGLang's allocators pass, will do; the pool keeps its memory.

        Raises:
            TypeError: it is no tensor.
            ValueError: it is not such a tensor.
        """
        mapping = full_to_hisparse_device_index_mapping
        if isinstance(mapping, weakref.ProxyType):
            mapping = mapping.detach()  # a tensor over the same entries: torch takes no proxies
        if not isinstance(mapping, torch.Tensor):
            raise TypeError(
                f"a mapping must be a contiguous int64 tensor [n], got {type(mapping).__name__}"
            )
        if mapping.dtype != torch.int64 or mapping.dim() != 1 or not mapping.is_contiguous():
            raise ValueError(
                f"a mapping must be contiguous int64 [n], got {mapping.dtype} "
                f"{list(mapping.shape)} with strides {list(mapping.stride())}"
            )
        check_device("mapping", mapping, self._device)
        self.full_to_hisparse_device_index_mapping = mapping

    def _mapping(self) -> torch.Tensor:
        if self.full_to_hisparse_device_index_mapping is None:
            raise RuntimeError(
                "HiSparseC4DevicePool has no mapping yet; call register_mapping(mapping) first"
            )
        return self.full_to_hisparse_device_index_mapping

    def _entries(self) -> torch.Tensor:
        """The mapping, to be indexed: torch reads past a storage that was shrunk in place.

        Moves need no such look: their mover notices memory that changed.
        """
        mapping = self._mapping()
        if torch.compiler.is_compiling():
            return mapping
        held = mapping.untyped_storage().nbytes() // mapping.element_size()
        if mapping.storage_offset() + mapping.numel() > held:
            raise RuntimeError(
                f"the mapping's memory was freed or shrunk to {held} entries, and it has "
                f"{mapping.numel()}; call register_mapping with a mapping that holds its entries"
            )
        return mapping

    def rows(self) -> list[Rows]:
        """As the parent's, behind the mapping; see ``KVCache.rows``.

        Raises:
            RuntimeError: also where no mapping is registered.
        """
        return self._rows_of(
            "kv_buffer",
            self.kv_buffer,
            self._shape(),
            "page_split",
            page_size=self.page_size,
            widths=WIDTHS,
            mapping=self._mapping(),
        )

    def _tensors(self) -> list[torch.Tensor]:
        return [*self.kv_buffer, self._mapping()]

    @property
    def data_ptrs(self) -> torch.Tensor:
        """Addresses of the buffers, uint64 ``[layer_num]``."""
        return address_tensor(self.kv_buffer, self._device)

    # Translation

    def translate_loc_from_full_to_compressed(self, full_indices: torch.Tensor) -> torch.Tensor:
        """Compressed locs of the full locs that end a group of 4; the others have none."""
        ends = (full_indices + 1) % self.compress_ratio == 0
        return full_indices[ends] // self.compress_ratio

    def translate_loc_to_hisparse_device(self, compressed_indices: torch.Tensor) -> torch.Tensor:
        """Slots of compressed locs, int32, 0 or less where there is none."""
        return self._translate_loc_to_hisparse_device(compressed_indices).to(torch.int32)

    def _translate_loc_to_hisparse_device(self, compressed_indices: torch.Tensor) -> torch.Tensor:
        """Slots of compressed locs, int64; engines call it by this name."""
        return self._entries()[compressed_indices]

    def translate_loc_from_full_to_hisparse_device(
        self, full_indices: torch.Tensor
    ) -> torch.Tensor:
        """Slots of the full locs that end a group of 4, int64."""
        return self._translate_loc_to_hisparse_device(
            self.translate_loc_from_full_to_compressed(full_indices)
        )

    def _checked_slots(self, loc_info: torch.Tensor | HasLoc) -> torch.Tensor:
        loc = slots_of("loc", loc_info)
        check_device("loc", loc, self._device)
        mapping = self._entries()
        # An unmapped loc is padding or was freed: 0 and less lead to the dummy slot.
        slots = mapping[within("loc", loc, mapping.numel())].clamp_min(0)
        return within("mapping[loc]", slots, self.slots)

    def _host_slots(self, indices: torch.Tensor) -> torch.Tensor:
        mapping = self._entries()
        loc = slots_of("indices", indices)
        check_range("indices", loc, mapping.numel())
        slots = mapping[loc.to(self._device)]
        unmapped = loc[(slots <= 0).to(loc.device)]
        if unmapped.numel():
            raise ValueError(
                f"loc {int(unmapped[0])} has no slot on the device (its mapping entry is 0 or "
                "less); a host copy takes mapped locs only"
            )
        check_range("mapping[indices]", slots, self.slots)
        return slots
