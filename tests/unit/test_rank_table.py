"""Ascend rank tables: what they say is read, and each mistake that people make has its sentence."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Callable

import pytest

from ms_kungfu.devices import rank_table
from ms_kungfu.devices.rank_table import Device, RankTableError, Server, find_mistakes, parse

# Two servers with ranks that don't follow their order, as a cluster's scheduler may deal them out.
DOCUMENT: dict[str, Any] = {
    "version": "1.0",
    "server_count": "2",
    "server_list": [
        {
            "server_id": "10.0.0.7",
            "device": [
                {"device_id": "4", "device_ip": "192.1.27.6", "rank_id": "2", "device_port": "16667"},
                {"device_id": "0", "device_ip": "192.2.27.6", "rank_id": "0"},
            ],
            "host_nic_ip": "reserve",
        },
        {"server_id": "node_1", "device": [{"device_id": "4", "device_ip": "fe80::1:2", "rank_id": "1"}]},
    ],
    "status": "completed",
}


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    document = copy.deepcopy(DOCUMENT)
    change(document)
    return document


def devices(document: dict[str, Any], server: int = 0) -> list[dict[str, Any]]:
    return document["server_list"][server]["device"]


def test_a_table_is_read_with_ranks_devices_and_addresses() -> None:
    table = parse(json.dumps(DOCUMENT))
    assert table.size == 3
    assert [(s.id, d.rank, d.device_id, d.ip) for s in table.servers for d in s.devices] == [
        ("10.0.0.7", 2, 4, "192.1.27.6"),
        ("10.0.0.7", 0, 0, "192.2.27.6"),
        ("node_1", 1, 4, "fe80::1:2"),
    ]


def test_one_server_needs_no_addresses() -> None:
    document = changed(lambda d: d.update(server_list=d["server_list"][:1], server_count="1"))
    for device, rank in zip(devices(document), "01"):
        del device["device_ip"]
        device["rank_id"] = rank
    assert parse(json.dumps(document)).servers == (
        Server("10.0.0.7", (Device(0, 4), Device(1, 0)), {"host_nic_ip": "reserve"}),
    )


MISTAKES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda d: d.pop("version"), 'version must be "1.0", the only one that is supported, got nothing'),
    (lambda d: d.update(version=1.0), 'version must be "1.0", the only one that is supported, got 1.0 as a number'),
    (lambda d: d.update(version="1.2"), 'version must be "1.0", the only one that is supported, got "1.2"'),
    (
        lambda d: d.update(status="initializing"),
        'status is "initializing": the table is not complete; wait for "completed"',
    ),
    (lambda d: d.pop("status"), 'status must be "completed", got nothing'),
    (
        lambda d: d.update(server_count="1"),
        'server_count must be "2", the number of servers in server_list, got "1"',
    ),
    (
        lambda d: d.update(server_count=2),
        'server_count must be "2", the number of servers in server_list, got 2 as a number',
    ),
    (lambda d: d.update(server_list=[]), "server_list must be a list of servers, got an empty list"),
    (lambda d: d.pop("server_list"), "server_list must be a list of servers, got nothing"),
    (lambda d: d["server_list"].__setitem__(0, "10.0.0.7"), 'server 0 must be an object, got "10.0.0.7"'),
    (
        lambda d: d["server_list"][1].pop("server_id"),
        "server_id of server 1 must be text of 1 to 63 letters, got nothing",
    ),
    (
        lambda d: d["server_list"][1].update(server_id="10.0.0.7"),
        "server 10.0.0.7 is listed twice; put all devices of a server into one entry",
    ),
    (
        lambda d: d["server_list"][1].update(device=[]),
        "server node_1 must have a list of devices under the key device, got an empty list",
    ),
    (lambda d: devices(d).append(3), "device 2 of server 10.0.0.7 must be an object, got 3 as a number"),
    (
        lambda d: devices(d)[1].update(device_id="4"),
        "device 4 of server 10.0.0.7 is listed twice; each rank needs its own device",
    ),
    (
        lambda d: devices(d)[1].update(device_id=0),
        "device_id of device in place 1 of server 10.0.0.7 must be a number as text, got 0 as a number",
    ),
    (
        lambda d: devices(d)[1].update(rank_id="-1"),
        'rank_id of device 0 of server 10.0.0.7 must be a number as text, got "-1"',
    ),
    (
        lambda d: devices(d)[1].update(rank_id="1"),
        "rank 1 is given twice, to device 0 of server 10.0.0.7 and to device 4 of server node_1",
    ),
    (lambda d: devices(d)[0].update(rank_id="5"), "ranks must go from 0 to 2 without gaps; missing: 2"),
    (lambda d: devices(d)[1].update(rank_id="3"), "ranks must go from 0 to 2 without gaps; missing: 0"),
    (
        lambda d: devices(d)[0].update(device_ip="192.1.*.6"),
        'device_ip of device 4 of server 10.0.0.7 must be an IP address, got "192.1.*.6"',
    ),
    (
        lambda d: devices(d)[0].update(device_ip="192.2.27.6"),
        "device_ip 192.2.27.6 is given twice, to device 4 of server 10.0.0.7 and to device 0 of server 10.0.0.7",
    ),
    (
        lambda d: devices(d, 1)[0].pop("device_ip"),
        "device_ip of device 4 of server node_1 is missing: with several servers, every device needs the address of "
        "its network card",
    ),
]


@pytest.mark.parametrize(("change", "sentence"), MISTAKES, ids=[sentence[:40] for _, sentence in MISTAKES])
def test_each_mistake_has_its_sentence(change: Callable[[dict[str, Any]], object], sentence: str) -> None:
    document = changed(change)
    assert sentence in find_mistakes(document)
    with pytest.raises(RankTableError) as caught:
        parse(json.dumps(document), "rank table x.json")
    assert str(caught.value).startswith("rank table x.json: ")


def test_gap_is_reported_once_and_not_as_an_echo_of_another_mistake() -> None:
    # Each leaves rank 0 missing, which is not what went wrong.
    for rank, sentence in (("x", "must be a number as text"), ("1", "rank 1 is given twice")):
        (mistake,) = find_mistakes(changed(lambda d, rank=rank: devices(d)[1].update(rank_id=rank)))
        assert sentence in mistake


def test_all_mistakes_are_reported_at_once() -> None:
    def change(document: dict[str, Any]) -> None:
        document["server_count"] = "3"
        devices(document)[0]["rank_id"] = "0"
        devices(document, 1)[0]["device_ip"] = "here"

    with pytest.raises(RankTableError) as caught:
        parse(json.dumps(changed(change)))
    assert len(caught.value.mistakes) == 3
    assert all(mistake in str(caught.value) for mistake in caught.value.mistakes)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "it is not JSON"),
        ('{"version": "1.0",  // the version\n}', "JSON has no comments"),
        ("[]", "it must be a JSON object, got an empty list"),
        ('"text"', "it must be a JSON object"),
        ('{"server_group_list": []}', "a global rank table of several jobs, which is not supported"),
        ('{"group_list": []}', "a table in the older format whose content"),
    ],
)
def test_malformed_rank_table_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(RankTableError, match=sentence):
        parse(text)


def test_the_file_is_named_where_it_can_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(RankTableError, match=r"nothing\.json: it can't be read: No such file"):
        rank_table.read(tmp_path / "nothing.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(RankTableError, match=r"bytes\.json: it is not a text file"):
        rank_table.read(tmp_path / "bytes.json")


def test_the_environment_names_the_file_as_mindspore_reads_it() -> None:
    assert rank_table.path_from({}) is None
    assert rank_table.path_from({"RANK_TABLE_FILE": ""}) is None
    assert rank_table.path_from({"RANK_TABLE_FILE": "a"}) == Path("a")
    assert rank_table.path_from({"RANK_TABLE_FILE": "a", "MINDSPORE_HCCL_CONFIG_PATH": "b"}) == Path("b")


def test_the_command_shows_a_table_or_its_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "t.json"
    file.write_text(json.dumps(DOCUMENT))
    assert rank_table.main([str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "rank 0: device 0 of server 10.0.0.7, 192.2.27.6",
        "rank 1: device 4 of server node_1, fe80::1:2",
        "rank 2: device 4 of server 10.0.0.7, 192.1.27.6",
    ]
    file.write_text(json.dumps(changed(lambda d: d.update(server_count="3", status="half"))))
    monkeypatch.delenv("MINDSPORE_HCCL_CONFIG_PATH", raising=False)
    monkeypatch.setenv("RANK_TABLE_FILE", str(file))
    assert rank_table.main([]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"{file}: ") for line in lines)
    monkeypatch.delenv("RANK_TABLE_FILE")
    assert rank_table.main([]) == 1
    assert "set RANK_TABLE_FILE" in capsys.readouterr().err


def of_first_form(*instances: tuple[str, str, str], **more: object) -> str:
    """As MindSpore's first releases wrote it: each rank, its server and its device."""
    listed = [
        {"devices": [{"device_id": d, "device_ip": f"192.168.{i}.1"}], "rank_id": r, "server_id": s}
        for i, (r, s, d) in enumerate(instances)
    ]
    group = {"device_num": "2", "server_num": "1", "instance_count": str(len(listed)), "instance_list": listed}
    return json.dumps({"board_id": "0x0000", "deploy_mode": "lab", "group_list": [group], **more})


def test_a_table_of_the_first_form_is_converted() -> None:
    table = parse(of_first_form(("1", "10.0.0.2", "4"), ("0", "10.0.0.1", "0"), ("2", "10.0.0.2", "5")))
    found = {(s.id, d.rank, d.device_id, d.ip) for s in table.servers for d in s.devices}
    assert found == {
        ("10.0.0.2", 1, 4, "192.168.0.1"),
        ("10.0.0.1", 0, 0, "192.168.1.1"),
        ("10.0.0.2", 2, 5, "192.168.2.1"),
    }


def test_mistake_in_a_table_of_the_first_form_is_reported_alike() -> None:
    with pytest.raises(RankTableError, match="rank 0 is given twice"):
        parse(of_first_form(("0", "10.0.0.1", "0"), ("0", "10.0.0.1", "1")))
    with pytest.raises(RankTableError, match='status is "initializing"'):
        parse(of_first_form(("0", "10.0.0.1", "0"), status="initializing"))
