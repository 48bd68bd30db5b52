"""Bytes as tokens, as in MambaByte: ids 0–255 are the UTF-8 bytes themselves."""

from __future__ import annotations

import hashlib

from edge.text.tokenizer import Tokenizer


class ByteTokenizer(Tokenizer):
    """A tokenizer whose tokens are bytes. None is special; `eos` may be a byte that ends texts."""

    kind = "bytes"
    vocab_size = 256
    fingerprint = hashlib.sha256(b"bytes\0").hexdigest()
    longest_piece = 1

    def __init__(
        self,
        *,
        bos: int | None = None,
        eos: tuple[int, ...] = (),
        pad: int | None = None,
        add_bos: bool = False,
    ) -> None:
        self.bos, self.eos, self.pad, self.add_bos = bos, eos, pad, add_bos

    def _encode_plain(self, text: str, *, first: bool) -> list[int]:
        return list(text.encode("utf-8"))

    def token_bytes(self, token: int) -> bytes:
        return bytes((self.check_id(token),))

    def id_to_piece(self, token: int) -> str:
        return f"<0x{self.check_id(token):02X}>"
