"""Both ends of a connection prove that they know the job's secret, before they send any other message.

Each end sends a nonce, and then an HMAC-SHA256 with the secret as the key. The HMAC's input is a word that names the
sender's role, followed by both nonces. Connections between hosts use other roles than connections between an agent and
its workers. So a proof can't be reused by the other end, in another connection, or at another kind of server.

Until the proof is verified, a message may have at most `MAX_STRANGERS_BYTES`. If there is no secret (-no-secret), both
ends use an empty key, which proves nothing. Without TLS, the messages after the proof are neither signed nor encrypted.
"""

from __future__ import annotations

from typing import Callable

from msgspec import Struct

from ms_kungfu._decoding import ProtocolError
from ms_kungfu._proofs import is_proof, new_nonce, proof_of
from ms_kungfu._words import printable
from ms_kungfu.launcher.channel import MAX_STRANGERS_BYTES, Stream
from ms_kungfu.launcher.wire import messages as m


class Roles(Struct, frozen=True):
    """The words for the roles of the two ends. `rejection`: the error message to a caller that has another secret."""

    caller: str
    called: str
    rejection: str


BETWEEN_HOSTS = Roles(
    "caller", "called", "the called launcher has another secret (KUNGFU_JOB_SECRET, -secret-file, -no-secret)"
)
OF_A_WORKER = Roles("worker", "broker", "the job's broker has another secret (KUNGFU_JOB_SECRET)")


async def prove(channel: Stream, secret: bytes) -> None:
    """At the calling end, prove that this host knows the secret, and verify the other end's proof.

    Workers use `broker_protocol.prove` instead.
    """
    roles, nonce = BETWEEN_HOSTS, new_nonce()
    channel.send(m.Nonce(nonce, m.PROTOCOL))
    challenge = await _nonce_on(channel)
    channel.send(m.Proof(proof_of(secret, roles.caller, challenge, nonce)))
    answer = await channel.receive(m.PROOF, MAX_STRANGERS_BYTES)
    if isinstance(answer, m.Error):
        raise ProtocolError(printable(answer.error))
    if not is_proof(answer.proof, secret, roles.called, challenge, nonce):
        raise ProtocolError("the other end doesn't know the job's secret (KUNGFU_JOB_SECRET, -secret-file)")


async def challenge(channel: Stream, secret: bytes, roles: Roles, proved: Callable[[], None]) -> None:
    """At the called end, verify the caller's proof and send this end's proof.

    `proved` is called before the caller can know that its proof is valid.
    """
    nonce, challenge = await _nonce_on(channel), new_nonce()
    channel.send(m.Nonce(challenge, m.PROTOCOL))
    proof = await channel.receive(m.PROOF, MAX_STRANGERS_BYTES)
    if isinstance(proof, m.Error) or not is_proof(proof.proof, secret, roles.caller, challenge, nonce):
        channel.send(m.Error(roles.rejection))
        raise ProtocolError("the caller doesn't know the job's secret")
    proved()
    channel.send(m.Proof(proof_of(secret, roles.called, challenge, nonce)))


async def _nonce_on(channel: Stream) -> str:
    """Return the other end's nonce. Raises ProtocolError if it rejects this host or uses another protocol."""
    first = await channel.receive(m.NONCE, MAX_STRANGERS_BYTES)
    if isinstance(first, m.Error):
        raise ProtocolError(printable(first.error))
    if first.protocol != m.PROTOCOL:
        why = (
            f"the other end uses protocol {first.protocol}, but this end uses {m.PROTOCOL}; install the same "
            f"ms_kungfu on all hosts"
        )
        channel.send(m.Error(why))
        raise ProtocolError(why)
    return first.nonce
