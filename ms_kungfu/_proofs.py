"""Proofs that both ends of a connection know the job's secret."""

from __future__ import annotations

import hmac
import secrets

_NONCE_BYTES = 16


def new_nonce() -> str:
    return secrets.token_hex(_NONCE_BYTES)


def proof_of(secret: bytes, role: str, called_nonce: str, callers_nonce: str) -> str:
    """Return the hex of HMAC-SHA256 over role and nonces.

    Because the role is part of it, an end can't send a proof back as its own.
    """
    return hmac.new(secret, (role + called_nonce + callers_nonce).encode(), "sha256").hexdigest()


def is_proof(proof: object, secret: bytes, role: str, called_nonce: str, callers_nonce: str) -> bool:
    expected = proof_of(secret, role, called_nonce, callers_nonce)
    return isinstance(proof, str) and hmac.compare_digest(proof.encode(), expected.encode())
