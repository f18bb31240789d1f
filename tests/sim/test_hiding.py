"""Multicast and fabric handles: hidden from libraries where no suspend could carry them, and how to keep them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.programs.client import Worker
from tests.programs.tool import Tool
from tests.sim.conftest import MIB
from tests.sim.multicast import SIZE, bound_team

Start = Callable[..., Worker]

NOT_PERMITTED, NOT_SUPPORTED = 800, 801
FABRIC = 8
OLD, NEW = {"SIMCUDA_DRIVER_VERSION": "609.99.01"}, {"SIMCUDA_DRIVER_VERSION": "610.5"}
KEEP, HIDE = {"GPUSHARE_MULTICAST": "keep"}, {"GPUSHARE_MULTICAST": "hide"}
WITH_FABRIC = {"SIMCUDA_FABRIC": "1"}


def multicast(worker: Worker) -> tuple[int, int]:
    """Return whether the device says that it has multicast, and what the driver answers who makes an object."""
    return worker.device_attribute("MULTICAST_SUPPORTED", 0), worker.code("multicast_create", 2 * MIB)


@pytest.mark.parametrize(
    ("env", "shown"),
    [
        (OLD, False),
        (NEW, True),
        (NEW | {"GPUSHARE_MULTICAST": "auto"}, True),
        (OLD | {"GPUSHARE_MULTICAST": "auto"}, False),
        (NEW | {"GPUSHARE_MULTICAST": "nonsense"}, True),
        (OLD | {"GPUSHARE_MULTICAST": "nonsense"}, False),
        ({"SIMCUDA_DRIVER_VERSION": "no number"}, False),
        ({"SIMCUDA_DRIVER_VERSION": "x86_64  1000.1"}, True),
        (OLD | KEEP, True),
        (NEW | KEEP, True),
        (NEW | HIDE, False),
    ],
    ids=str,
)
def test_multicast_by_setting_and_driver(start_worker: Start, env: dict[str, str], shown: bool) -> None:
    assert multicast(start_worker(0, env=env)) == ((1, 0) if shown else (0, NOT_SUPPORTED))


def test_without_the_shim_the_driver_answers(start_worker: Start) -> None:
    worker = start_worker(0, shim=False, env=OLD | WITH_FABRIC)
    assert multicast(worker) == (1, 0)
    assert worker.device_attribute("HANDLE_TYPE_FABRIC_SUPPORTED", 0) == 1
    assert worker.device_attribute("MEMPOOL_SUPPORTED_HANDLE_TYPES", 0) == 1 | FABRIC


@pytest.mark.parametrize("env", [OLD, NEW, {"GPUSHARE_FABRIC": "1"}, {"NVSNAP_GPUSHARE_FABRIC": "0"}], ids=str)
def test_fabric_is_hidden_whatever_the_driver(start_worker: Start, env: dict[str, str]) -> None:
    worker = start_worker(0, env=env | WITH_FABRIC)
    assert worker.device_attribute("HANDLE_TYPE_FABRIC_SUPPORTED", 0) == 0
    assert worker.device_attribute("MEMPOOL_SUPPORTED_HANDLE_TYPES", 0) == 1
    assert worker.code("mem_create", 2 * MIB, "device", 0, FABRIC) == NOT_PERMITTED
    assert worker.code("mem_create", 2 * MIB, "device", 0, 1) == 0


@pytest.mark.parametrize("env", [{"GPUSHARE_FABRIC": "keep"}, {"NVSNAP_GPUSHARE_FABRIC": "1"}], ids=str)
def test_fabric_that_is_kept(start_worker: Start, env: dict[str, str]) -> None:
    worker = start_worker(0, env=env | WITH_FABRIC)
    assert worker.device_attribute("HANDLE_TYPE_FABRIC_SUPPORTED", 0) == 1
    assert worker.device_attribute("MEMPOOL_SUPPORTED_HANDLE_TYPES", 0) == 1 | FABRIC
    assert worker.code("mem_create", 2 * MIB, "device", 0, FABRIC) == 0


@pytest.mark.usefixtures("own_network")
def test_FR19_multicast_that_is_kept_on_an_old_driver(start_worker: Start, tool: Tool) -> None:
    """It works, and stands in the way of a suspend in every process that has it, until it is gone."""
    team = bound_team(lambda device: start_worker(device, env=OLD | KEEP), 2)
    for seat in team.seats:
        error = tool.suspend(*team.pids).expect(3).json["error"]
        assert (error["code"], error["pid"], error["facts"]["kind"]) == ("uncarried", seat.worker.pid, "multicast")
        (made,) = error["facts"]["objects"]["multicast"]
        assert made == hex(seat.team)  # the handle that the application has
        assert made in error["message"] and "GPUSHARE_MULTICAST=hide" in error["message"]
        if seat is team.seats[0]:
            team.check(1)
        seat.worker.multicast_unbind(seat.team, seat.device, 0, SIZE)
        seat.worker.drop_block({"handle": seat.team, "address": seat.address, "size": SIZE})
    tool.suspend(*team.pids).expect(0)
    tool.resume(*team.pids).expect(0)
