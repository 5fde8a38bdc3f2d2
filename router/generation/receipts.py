"""Receipts: digests of all that an answer was computed from and of its tokens, signed with the operator's key.

Anyone with the public key can check one (`check_receipt`); `outrider replay` computes the answer again.
"""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)
from pydantic import BaseModel, ConfigDict, ValidationError

from protos.errors import ConfigError, RequestError
from protos.messages import GenerateRequest, VerifyMode
from protos.served_model import FingerprintPart, ModelCard, read_fingerprint, with_tokenizer
from router.api_keys import current_client
from router.requests.generation_fields import GenerationFields
from router.tokenizer.tokenizer_files import TokenizerFiles

KEY_OPTION = "ingress.receipt_key_file"
_REMEDY = "make one with `openssl genpkey -algorithm ed25519 -out FILE`"
_PUBLIC_REMEDY = "the operator writes it with `openssl pkey -in KEY_FILE -pubout`"


class ReceiptChoice(BaseModel):
    """One choice: digests of the token ids of its prompt and of its answer."""

    model_config = ConfigDict(extra="forbid")

    index: int
    sample: int
    prompt: str
    tokens: str
    num_tokens: int


class Receipt(BaseModel):
    """`receipt` of an answer; `signature` is of `signed_bytes`."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[1]  # always set: answers leave out a default
    id: str
    created: int
    model: str
    weights: str
    draft: str
    kernels: str
    settings: str
    tokenizer: str
    template: str
    sampling: str
    seed: int
    choices: list[ReceiptChoice]
    public_key: str = ""
    signature: str = ""

    def signed_bytes(self) -> bytes:
        """Return all fields but the signature as JSON in ASCII, names sorted, without spaces."""
        return json.dumps(self.model_dump(exclude={"signature"}), sort_keys=True, separators=(",", ":")).encode()


def read_receipt(value: object) -> Receipt:
    """Return the receipt of an answer in JSON. Raises ConfigError for another version or form."""
    try:
        return Receipt.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(map(str, ("receipt", *first["loc"])))
        raise ConfigError(f"{name} is not as in version 1: {first['msg']}; replay it with its own version") from None


def check_receipt(receipt: Receipt) -> bool:
    """True if the signature is right for `public_key`. The reader must know whose key it is."""
    try:
        key = Ed25519PublicKey.from_public_bytes(base64.b64decode(receipt.public_key, validate=True))
        key.verify(base64.b64decode(receipt.signature, validate=True), receipt.signed_bytes())
    except (ValueError, InvalidSignature):
        return False
    return True


def read_public_key(path: str) -> str:
    """Return the public key of a PEM file as receipts write it. Raises ConfigError if it holds none."""
    try:
        key = load_pem_public_key(Path(os.path.expanduser(path)).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path!r} holds no public key: {error}; {_PUBLIC_REMEDY}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigError(f"{path!r} holds a key of another kind than Ed25519; {_PUBLIC_REMEDY}")
    return _written(key)


def _written(key: Ed25519PublicKey) -> str:
    return base64.b64encode(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).decode()


def digest_of_ids(token_ids: Sequence[int]) -> str:
    """Return the SHA-256 of token ids, each in four bytes, the lowest first. Raises ValueError for other values."""
    try:
        return sha256(_ids_bytes(token_ids)).hexdigest()
    except struct.error as error:
        raise ValueError(f"these are no token ids: {error}") from None


def _ids_bytes(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def read_private_key(path: str) -> Ed25519PrivateKey:
    """Return the operator's private key, from a PEM file without a password.

    Raises:
        ConfigError: the file cannot be read, or holds no such key.
    """
    name = f"{KEY_OPTION} {path!r}"
    try:
        key = load_pem_private_key(Path(os.path.expanduser(path)).read_bytes(), password=None)
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error}") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{name} holds no private key: {error}; {_REMEDY}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{name} holds a key of another kind than Ed25519; {_REMEDY}")
    return key


def sign(receipt: Receipt, key: Ed25519PrivateKey) -> Receipt:
    """Return the receipt with the public key and the signature."""
    named = receipt.model_copy(update={"public_key": _written(key.public_key())})
    signature = base64.b64encode(key.sign(named.signed_bytes())).decode()
    return named.model_copy(update={"signature": signature})


class OpenReceipt:
    """The receipt of an answer that is being computed; `digests` are of all but prompts and tokens."""

    def __init__(self, key: Ed25519PrivateKey, digests: Mapping[str, Any], requests: Sequence[GenerateRequest]) -> None:
        self._key = key
        self._digests = digests
        self._requests = requests
        self._hashes = [sha256() for _ in requests]
        self._counts = [0] * len(requests)

    def record(self, index: int, token_ids: Sequence[int]) -> None:
        """Count the next tokens of a choice."""
        self._hashes[index].update(_ids_bytes(token_ids))
        self._counts[index] += len(token_ids)

    def signed(self, **names: Any) -> Receipt:
        """Return the receipt with the answer's id, time and model; call it after the last token."""
        counted = enumerate(zip(self._requests, self._hashes, self._counts, strict=True))
        choices = [
            ReceiptChoice(
                index=index,
                sample=request.sample_index,
                prompt=digest_of_ids(request.prompt_token_ids),
                tokens=tokens.hexdigest(),
                num_tokens=count,
            )
            for index, (request, tokens, count) in counted
        ]
        seed = self._requests[0].sampling.seed
        return sign(Receipt(version=1, **names, **self._digests, seed=seed, choices=choices), self._key)


def key_for(fields: GenerationFields, card: ModelCard, key: Ed25519PrivateKey | None) -> Ed25519PrivateKey | None:
    """Return the key to sign with; None where neither the request nor its API key asks for a receipt.

    Raises:
        RequestError: the server has no key, or the output could not be computed again.
    """
    if not (current_client.get().has_receipts if fields.receipt is None else fields.receipt):
        return None
    if key is None:
        raise RequestError(
            f"This server signs no receipts; leave receipt out (an operator sets {KEY_OPTION}).", param="receipt"
        )
    wishes = fields.speculation
    verify = (wishes and wishes.verify) or card.verify
    mode = "approximate" if wishes and wishes.mode == "approximate" else verify
    if mode != VerifyMode.COUPLED:
        raise RequestError(
            f"receipt is of an output that can be computed again, and speculation is {str(mode)!r} here; leave receipt "
            "out, or set speculation.verify to coupled and no mode.",
            param="receipt",
        )
    return key


def digests_of(
    card: ModelCard, files: TokenizerFiles, requests: Sequence[GenerateRequest], fields: GenerationFields
) -> dict[str, str]:
    """Return the digests of all that the tokens depend on except prompts; empty where a pair does not report one."""
    known = read_fingerprint(with_tokenizer(card.fingerprint, files.digest)) or {}
    parts = (FingerprintPart.DRAFT, FingerprintPart.KERNELS, FingerprintPart.SETTINGS)
    template = files.chat_template.source if files.chat_template else ""
    sampled = [replace(each.sampling, num_logprobs=None, num_prompt_logprobs=None) for each in requests]
    stops = (fields.stop, fields.skip_special_tokens, fields.include_stop_str_in_output)
    return {
        "weights": card.model_version,
        **{str(part): known.get(part, "") for part in parts},
        "tokenizer": files.tokenizer_digest,
        "template": _digest(template),
        "sampling": _digest(repr((sampled, stops))),
    }


def _digest(text: str) -> str:
    return sha256(text.encode(errors="surrogatepass")).hexdigest()
