"""The control client: parsing, credentials, descriptors, deadlines, paging."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpususpend import control, errors, processes
from gpususpend.control import ControlClient, ShimRefused, parse_reply
from gpususpend.deadline import Deadline
from gpususpend.defaults import limits_with
from tests.unit.fake_shim import FakeShim, sleeper


def client() -> ControlClient:
    """Return a client of this process's own name."""
    return ControlClient(os.getpid(), os.getpid(), os.geteuid())


def test_reply_of_a_list_with_groups() -> None:
    """Head, groups and numbers in both bases."""
    reply = parse_reply("ok 1 total=2 next=0 | key=0x1.2 pid=7 | key=0x1.3 pid=0x8")
    assert reply.ok and reply.number("total") == 2
    assert [group["key"] for group in reply.groups] == ["0x1.2", "0x1.3"]
    assert control.number(reply.groups[1], "pid") == 8


def test_sentence_takes_the_rest() -> None:
    """`msg=` may hold spaces, bars and equal signs."""
    reply = parse_reply("err 1 code=cuda step=unmap cuda=999 msg=it said a=b | c and stopped")
    assert reply.text("msg") == "it said a=b | c and stopped"
    assert "unmap" in control.describe(reply) and "999" in control.describe(reply)


@pytest.mark.parametrize("text", ["", "ok", "yes 1", "ok 2", "ok 1 novalue", "err 1 =x", "msg=x"])
def test_nonsense_is_refused(text: str) -> None:
    """What is no reply raises ValueError and nothing else."""
    with pytest.raises(ValueError):
        parse_reply(text)


@settings(deadline=None)  # on a busy machine any call may take long
@given(st.text(max_size=200))
def test_any_text_parses_or_raises_value_error(text: str) -> None:
    """Whatever a socket sends."""
    try:
        parse_reply(text)
    except ValueError:
        pass


def test_request_carries_version_verb_pairs_and_descriptor() -> None:
    """One datagram, one descriptor."""
    with FakeShim({"arena": "ok 1 bytes=4096 locked_bytes=4096"}) as shim, client() as one:
        fd = os.memfd_create("test")
        reply = one.request("arena", Deadline(30), fd=fd, bytes=4096)
        os.close(fd)
        assert reply.number("locked_bytes") == 4096
        assert shim.requests == [("arena", {"bytes": "4096"})] and shim.fds == 1


def test_refusal_carries_the_reply() -> None:
    """An `err` reply raises and keeps the connection."""
    with FakeShim({"release": "err 1 code=arena need=77 msg=too small"}) as shim, client() as one:
        with pytest.raises(ShimRefused) as caught:
            one.request("release", Deadline(30))
        assert caught.value.code == "arena" and caught.value.reply.number("need") == 77
        one.request("hello", Deadline(30))
        assert shim.verbs() == ["release", "hello"]


def test_list_over_several_datagrams() -> None:
    """`next` is followed until it is 0; a server that repeats itself does not keep the client for ever."""

    def page(pairs: dict[str, str]) -> str:
        start = int(pairs.get("from", "0"))
        following = start + 2 if start < 4 else 0
        return f"ok 1 total=6 next={following} | n={start} | n={start + 1}"

    with FakeShim({"imports": page, "fds": "ok 1 total=9 next=1 | fd=1"}), client() as one:
        assert [group["n"] for group in one.listing("imports", Deadline(30))] == list("012345")
        assert len(one.listing("fds", Deadline(30))) == 2


def test_deadline_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late reply must not answer the next request; one that comes a moment after the deadline is still taken."""

    over = threading.Event()

    def late(pairs: dict[str, str]) -> str:
        over.wait(60)
        return "ok 1 late=1"

    with FakeShim({"load": late, "hello": "ok 1 early=1"}), client() as one:
        monkeypatch.setattr(control, "LIMITS", limits_with(last_look_s=0.05))
        with pytest.raises(TimeoutError):
            one.request("load", Deadline(0.05))
        monkeypatch.setattr(control, "LIMITS", limits_with(last_look_s=60))
        over.set()
        assert one.request("hello", Deadline(30)).fields == {"early": "1"}
        assert one.request("hello", Deadline(0)).fields == {"early": "1"}


def test_hang_up_is_a_connection_error() -> None:
    """An empty datagram is the end."""
    with FakeShim({"hello": lambda pairs: None}) as shim, client() as one:  # type: ignore[dict-item, return-value]
        with pytest.raises(ConnectionError):
            one.request("hello", Deadline(30))
        assert shim.verbs() == ["hello"]


def test_other_protocol_version_is_named() -> None:
    """Whichever way the shim says it."""
    for answer in ("err 1 code=version supported=7", "err 7 code=version", "ok 7 pid=1"):
        with FakeShim({"hello": answer}), client() as one:
            with pytest.raises(errors.ProtocolVersion) as caught:
                one.request("hello", Deadline(30))
            assert "7" in str(caught.value)


def test_nobody_listens() -> None:
    """No shim at all."""
    with client() as one, pytest.raises(ConnectionRefusedError):
        one.request("hello", Deadline(30))


def test_B02_squatter_on_the_name_is_refused() -> None:
    """A process that binds another's name is not talked to."""
    victim = os.getppid()
    with FakeShim(pid=victim) as shim:
        one = ControlClient(victim, victim, os.geteuid())
        with pytest.raises(errors.WrongPeer) as caught:
            one.request("hello", Deadline(30))
        assert caught.value.facts["peer_pid"] == os.getpid()
        assert shim.requests == []


def test_B02_right_pid_of_another_user_is_refused() -> None:
    """The user counts too: a pid may have been reused."""
    with FakeShim() as shim:
        with pytest.raises(errors.WrongPeer):
            ControlClient(os.getpid(), os.getpid(), os.geteuid() + 1).request("hello", Deadline(30))
        assert shim.requests == []


def test_a_later_name_is_found_behind_gaps_and_squatters() -> None:
    """Whoever has the first name: all of them are tried, and the process is told by what the kernel says."""
    own, other = os.getpid(), os.getppid()
    with FakeShim(pid=other) as squatter, sleeper() as child:
        with FakeShim(name=control.socket_name(own, 9)) as shim, client() as one:
            assert one.request("hello", Deadline(30)).number("pid") == own
            assert shim.verbs() == ["hello"]
            assert control.who_listens(own, Deadline(30)) == [(own, os.geteuid())]
            assert control.listens(processes.read_process(own))
            assert own in control.listeners()
        assert not control.listens(processes.read_process(other))  # under its name it is this process
        assert not control.listens(processes.read_process(child.pid))
        assert squatter.verbs() == []


def test_descriptors_nobody_asked_for_are_closed() -> None:
    """A reply with a descriptor leaves none behind."""
    name = f"\0nvsnap-gpushare.{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(name)
        listener.listen()
        one = client()
        one.connect(Deadline(30))
        server, _ = listener.accept()
        before = len(os.listdir("/proc/self/fd"))
        socket.send_fds(server, [b"ok 1 a=1"], [0])
        assert one.request("hello", Deadline(30)).fields == {"a": "1"}
        assert len(os.listdir("/proc/self/fd")) == before
        one.close()
        server.close()


def test_listeners_are_read_from_proc(tmp_path: Path) -> None:
    """Only listening sockets with a plain number, and perhaps that of a later name, are shims."""
    net = tmp_path / "net"
    net.mkdir()
    (net / "unix").write_text(
        "Num RefCount Protocol Flags Type St Inode Path\n"
        "0: 00000002 00000000 00010000 0005 01 11 @nvsnap-gpushare.42\n"
        "0: 00000002 00000000 00010000 0005 01 12 @nvsnap-gpushare.7\n"
        "0: 00000003 00000000 00000000 0005 03 13 @nvsnap-gpushare.8\n"
        "0: 00000002 00000000 00010000 0005 01 14 @nvsnap-gpushare.x\n"
        "0: 00000002 00000000 00010000 0005 01 15 @nvsnap-gpushare.007\n"
        "0: 00000002 00000000 00010000 0005 01 16 /run/nvsnap-gpushare.9\n"
        "0: 00000002 00000000 00010000 0005 01 18 @nvsnap-gpushare.43.15\n"
        "0: 00000002 00000000 00010000 0005 01 18 @nvsnap-gpushare.42.1\n"
        "0: 00000002 00000000 00010000 0005 01 18 @nvsnap-gpushare.44.0\n"
        "0: 00000002 00000000 00010000 0005 01 18 @nvsnap-gpushare.44.1.1\n"
        "0: 00000002 00000000 00010000 0005 01 18 @nvsnap-gpushare.44.\n"
        "0: 00000002 00000000 00010000 0001 01 17\n"
    )
    assert control.listeners(str(tmp_path)) == [7, 42, 43]


def test_own_listener_is_seen() -> None:
    """The real table has the format that is read."""
    with FakeShim():
        assert os.getpid() in control.listeners()
