"""Read and check Ascend rank tables, which are JSON files that assign a server's device to each rank.

``RANK_TABLE_FILE`` or ``MINDSPORE_HCCL_CONFIG_PATH`` names a job's table. For most mistakes in a table, HCCL reports
only an error number and a time-out. This module reports all mistakes at the same time, each with a message. ``python -m
ms_kungfu.devices.rank_table FILE`` checks a table and prints its contents.

The format is version 1.0 in HCCL's user guide ("rank table configuration"), as shown in MindSpore's tutorial on rank
tables. Every value is a string, even if it is a number, because HCCL rejects other types. Tables in the older format
(``board_id``, ``instance_list``) are converted. Only `read` and `main` access files.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from ms_kungfu import env
from ms_kungfu._decoding import MalformedError, decode
from ms_kungfu._files import read_regular

VERSION = "1.0"
_LONGEST_SERVER_ID = 63
_MAX_BYTES = 16 * 1024 * 1024


class RankTableError(ValueError):
    """Raised for an invalid table. `mistakes` contains a message for each mistake."""

    def __init__(self, mistakes: Iterable[str], where: str = "rank table") -> None:
        self.mistakes = tuple(mistakes)
        super().__init__(f"{where}: {'; '.join(self.mistakes)}")


class Device(Struct, frozen=True):
    """A device, with its physical number on the server (`device_id`) and its network card's address (`ip`)."""

    rank: int
    device_id: int
    ip: str | None = None


class Server(Struct, frozen=True):
    """A server. `id` is a name that no other server has. MindSpore's tool uses the server's IP address as the name."""

    id: str
    devices: tuple[Device, ...]
    extra: Mapping[str, Any] = field(default_factory=dict)  # the server's other keys in the file


class RankTable(Struct, frozen=True):
    """A valid table, which `parse` and `read` return."""

    servers: tuple[Server, ...]

    @property
    def size(self) -> int:
        return sum(len(server.devices) for server in self.servers)


def path_from(environ: Mapping[str, str]) -> Path | None:
    """Return the path of the job's table, if any. MINDSPORE_HCCL_CONFIG_PATH takes precedence, as in MindSpore."""
    text = env.HCCL_CONFIG_PATH.get(environ) or env.RANK_TABLE_FILE.get(environ)
    return Path(text) if text else None


def parse(text: str, where: str = "rank table") -> RankTable:
    """Parse a table. If it has mistakes, raise a RankTableError that lists all mistakes after the prefix `where`."""
    try:
        document = decode(text, _MAX_BYTES)
    except MalformedError as error:
        hint = "; JSON has no comments" if "//" in text else ""
        raise RankTableError([f"{error}{hint}"], where) from None
    document = from_first_version(document)
    mistakes = list(find_mistakes(document))
    if mistakes:
        raise RankTableError(mistakes, where)
    return RankTable(tuple(map(_server, document["server_list"])))


def from_first_version(document: Any) -> Any:
    """Convert a table in the older format to a table with servers. Return any other document unchanged.

    A table in the older format lists the instances of one group (``board_id``, ``group_list``, ``instance_list``). Each
    instance has a rank and a device. `find_mistakes` checks the result.
    """
    if not isinstance(document, dict) or "server_list" in document:
        return document
    groups = document.get("group_list")
    if not isinstance(groups, list) or len(groups) != 1 or not isinstance(groups[0], dict):
        return document
    instances = groups[0].get("instance_list")
    if not isinstance(instances, list):
        return document
    servers: dict[Any, list[Any]] = {}
    for instance in instances:
        devices = instance.get("devices") if isinstance(instance, dict) else None
        name = instance.get("server_id") if isinstance(instance, dict) else None
        if not isinstance(name, str) or not isinstance(devices, list) or len(devices) != 1:
            return document
        device = devices[0] if isinstance(devices[0], dict) else {}
        servers.setdefault(name, []).append({**device, "rank_id": instance.get("rank_id")})
    listed = [{"server_id": name, "device": devices} for name, devices in servers.items()]
    # A table in the older format need not have a status.
    status = document.get("status", "completed")
    return {"version": VERSION, "status": status, "server_count": str(len(listed)), "server_list": listed}


def _server(document: Mapping[str, Any]) -> Server:
    extra = {key: value for key, value in document.items() if key not in ("server_id", "device")}
    return Server(document["server_id"], tuple(map(_device, document["device"])), extra)


def _device(document: Mapping[str, Any]) -> Device:
    return Device(int(document["rank_id"]), int(document["device_id"]), document.get("device_ip") or None)


def read(path: str | os.PathLike[str]) -> RankTable:
    """Read a file and return its table. If this fails, raise a RankTableError that names the file."""
    where = f"rank table {os.fspath(path)}"
    try:
        text = read_regular(path).decode("utf-8")
    except OSError as error:
        raise RankTableError([f"it can't be read: {error.strerror}"], where) from None
    except UnicodeDecodeError:
        raise RankTableError(["it is not a text file"], where) from None
    return parse(text, where)


def find_mistakes(document: object) -> Iterator[str]:
    """Yield a message for each mistake in a parsed document. A document without mistakes is a valid table."""
    if not isinstance(document, dict):
        yield f"it must be a JSON object, got {_kind(document)}"
        return
    for key, what in (
        ("server_group_list", "a global rank table of several jobs"),
        ("group_list", "a table in the older format whose content isn't one group of instances with one device each"),
    ):
        if key in document and "server_list" not in document:
            yield f"it is {what}, which is not supported; write one with server_list, version {VERSION}"
            return
    version = document.get("version")
    if version != VERSION:
        yield f'version must be "{VERSION}", the only one that is supported, got {_shown(version)}'
    status = document.get("status")
    if status == "initializing":
        yield 'status is "initializing": the table is not complete; wait for "completed"'
    elif status != "completed":
        yield f'status must be "completed", got {_shown(status)}'
    servers = document.get("server_list")
    if not isinstance(servers, list) or not servers:
        yield f"server_list must be a list of servers, got {_kind(servers)}"
        return
    count = document.get("server_count")
    if count != str(len(servers)):
        yield f'server_count must be "{len(servers)}", the number of servers in server_list, got {_shown(count)}'
    yield from _mistakes_in_servers(servers)


def _mistakes_in_servers(servers: list[Any]) -> Iterator[str]:
    ids: set[str] = set()
    ranks: dict[int, str] = {}
    ips: dict[str, str] = {}
    without_ip: list[str] = []
    all_ranks_known = True
    for i, server in enumerate(servers):
        who = f"server {i}"
        if not isinstance(server, dict):
            yield f"{who} must be an object, got {_kind(server)}"
            all_ranks_known = False
            continue
        name = server.get("server_id")
        if not isinstance(name, str) or not 1 <= len(name) <= _LONGEST_SERVER_ID:
            yield f"server_id of {who} must be text of 1 to {_LONGEST_SERVER_ID} letters, got {_shown(name)}"
        else:
            who = f"server {name}"
            if name in ids:
                yield f"{who} is listed twice; put all devices of a server into one entry"
            ids.add(name)
        devices = server.get("device")
        if not isinstance(devices, list) or not devices:
            yield f"{who} must have a list of devices under the key device, got {_kind(devices)}"
            all_ranks_known = False
            continue
        device_ids: set[int] = set()
        for j, device in enumerate(devices):
            if not isinstance(device, dict):
                yield f"device {j} of {who} must be an object, got {_kind(device)}"
                all_ranks_known = False
                continue
            device_id, rank = _number(device.get("device_id")), _number(device.get("rank_id"))
            which = f"device {device_id if device_id is not None else f'in place {j}'} of {who}"
            if device_id is None:
                yield f"device_id of {which} must be a number as text, got {_shown(device.get('device_id'))}"
            elif device_id in device_ids:
                yield f"{which} is listed twice; each rank needs its own device"
            else:
                device_ids.add(device_id)
            if rank is None:
                yield f"rank_id of {which} must be a number as text, got {_shown(device.get('rank_id'))}"
                all_ranks_known = False
            elif rank in ranks:
                yield f"rank {rank} is given twice, to {ranks[rank]} and to {which}"
                all_ranks_known = False
            else:
                ranks[rank] = which
            ip = device.get("device_ip")
            if ip is None or ip == "":
                without_ip.append(which)
            elif not _is_ip(ip):
                yield f"device_ip of {which} must be an IP address, got {_shown(ip)}"
            elif ip in ips:
                yield f"device_ip {ip} is given twice, to {ips[ip]} and to {which}"
            else:
                ips[ip] = which
    # Skip this check if a rank can't be read or is listed twice, because that mistake was reported above and causes the
    # gap.
    missing = sorted(set(range(len(ranks))) - set(ranks))
    if missing and all_ranks_known:
        listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        yield f"ranks must go from 0 to {len(ranks) - 1} without gaps; missing: {listed}"
    if without_ip and len(servers) > 1:
        yield (
            f"device_ip of {without_ip[0]} is missing: with several servers, every device needs the address of its "
            "network card"
        )


def _number(value: object) -> int | None:
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    return None


def _is_ip(value: object) -> bool:
    try:
        return isinstance(value, str) and bool(ipaddress.ip_address(value))
    except ValueError:
        return False


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, (dict, list)):
        return _kind(value)
    text = json.dumps(value, ensure_ascii=False)
    number = " as a number" if isinstance(value, (int, float)) and not isinstance(value, bool) else ""
    return (text if len(text) <= 80 else f"{text[:80]}...") + number


def _kind(value: object) -> str:
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return "an object" if isinstance(value, dict) else _shown(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a table.

    The exit status is 0 for a valid table, 1 for an invalid or missing table, and 2 for an invalid command line.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ms_kungfu.devices.rank_table",
        description="Checks an Ascend rank table and shows which rank has which device.",
    )
    parser.add_argument(
        "file", nargs="?", type=Path, help="default: the file in MINDSPORE_HCCL_CONFIG_PATH or RANK_TABLE_FILE"
    )
    path = parser.parse_args(arguments).file or path_from(os.environ)
    if path is None:
        print("no rank table: give a file, or set RANK_TABLE_FILE", file=sys.stderr)
        return 1
    try:
        table = read(path)
    except RankTableError as error:
        for mistake in error.mistakes:
            print(f"{path}: {mistake}", file=sys.stderr)
        return 1
    for rank, server, device in sorted((d.rank, s.id, d) for s in table.servers for d in s.devices):
        print(f"rank {rank}: device {device.device_id} of server {server}{f', {device.ip}' if device.ip else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
