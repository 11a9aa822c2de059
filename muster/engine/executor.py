"""The model and its key-value cache: runs one step."""

from __future__ import annotations

from torch import Tensor

from muster.engine.batch import Batch
from muster.errors import UsageError
from muster.model.decoder import Decoder


class Executor:
    """A decoder with a cache of `kv_bytes` at most, but not of more pages than `most_tokens` need.

    Attributes:
        decoder: the model.
        page_size: S.
        pages: P.
        page_bytes: bytes of one page over all layers.
    """

    def __init__(self, decoder: Decoder, *, page_size: int, kv_bytes: int, most_tokens: int) -> None:
        self.decoder = decoder
        self.page_size = page_size
        self.page_bytes = sum(
            layer.key_PSMH.nbytes + layer.value_PSMH.nbytes for layer in decoder.new_cache(1, page_size)
        )
        self.pages = min(kv_bytes // self.page_bytes, -(-most_tokens // page_size))
        if self.pages < 1:
            raise UsageError(
                "bytes for the key-value cache",
                found=f"{kv_bytes:,}",
                expected=f"at least {self.page_bytes:,}, one page of {page_size} tokens",
                hint="give more kv_bytes, or a smaller page_size",
            )
        self._cache = decoder.new_cache(self.pages, page_size)

    def run(self, batch: Batch) -> Tensor:
        """Computes the batch's tokens; float32 logits `[R, V]` in main memory, where tokens are chosen."""
        return self.decoder.forward(batch.tokens_T, batch.attention, self._cache, batch.rows_R).cpu()
