"""Proofs that both ends of a connection know the job's secret."""

from __future__ import annotations

import hmac
import secrets

_NONCE_BYTES = 16


def new_nonce() -> str:
    return secrets.token_hex(_NONCE_BYTES)


def proof_of(secret: bytes, role: str, called_nonce: str, callers_nonce: str) -> str:
    """Return the HMAC-SHA256 of the role and both nonces as hexadecimal digits.

    Because the proof contains the sender's role, the receiver can't return the same text as its own proof.
    """
    return hmac.new(secret, (role + called_nonce + callers_nonce).encode(), "sha256").hexdigest()


def is_proof(proof: object, secret: bytes, role: str, called_nonce: str, callers_nonce: str) -> bool:
    expected = proof_of(secret, role, called_nonce, callers_nonce)
    return isinstance(proof, str) and hmac.compare_digest(proof.encode(), expected.encode())
