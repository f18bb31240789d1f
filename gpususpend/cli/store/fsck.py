"""nvsnap-gpu-suspend store fsck."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from gpususpend.cli import options, storing

if TYPE_CHECKING:
    from chunkstore.fsck import Checked

STATE = "the check is not complete; what was repaired is repaired"


@click.command("fsck", short_help="Read and check everything in a store.")
@storing.store_argument
@click.option(
    "--repair-from", metavar="STORE2", type=click.Path(), callback=options.store_place,
    help="Take what is damaged or missing from this store.",
)  # fmt: skip
@storing.threads_option
@storing.store_options
def command(store_path: str, repair_from: str | None, threads: int, common: storing.Common) -> None:
    """Hash every chunk of STORE, and look whether every checkpoint has all of its chunks.

    Exits with 6 if anything is damaged or missing, with a list by checkpoint.  After a clean check, saves rely on the
    chunks that it has seen.

    \b
    Example:
      nvsnap-gpu-suspend store fsck /mnt/store
      nvsnap-gpu-suspend store fsck --repair-from /backup/store /mnt/store
    """
    with common.reporting("store fsck") as report, common.working(report) as work:
        from chunkstore import Damaged, Store, fsck
        from gpususpend.progress import readable_bytes

        store = Store.open(store_path, files=work.files)
        other = Store.open(repair_from, files=work.files) if repair_from is not None else None
        checked = fsck.check(store, repair_from=other, threads=threads, report=work.told("check", STATE))
        report.extra |= {"store": storing.store_data(store), "checked": {"clean": checked.clean, **asdict(checked)}}
        report.lines.append(f"{checked.chunks} chunks checked ({readable_bytes(checked.bytes)})")
        report.lines += _damage(checked)
        if not checked.clean:
            raise Damaged(
                what="the check of", path=store.path, advice=_advice(checked),
                detail=f"{sum(not bad.repaired for bad in checked.bad)} chunks are damaged or missing, "
                f"{len(checked.unreachable)} checkpoints cannot be read",
            )  # fmt: skip


def _advice(checked: Checked) -> str:
    if all(bad.repaired for bad in checked.bad):
        return "mount or repair these checkpoints, or forget those that are gone for good"
    return "repair it from a store that has them (--repair-from), or save these checkpoints anew"


def _damage(checked: Checked) -> list[str]:
    """Return the damage by checkpoint, and what hits none."""
    from gpususpend.report import table

    rows = [
        (path, bad.hash, "repaired" if bad.repaired else bad.detail)
        for bad in checked.bad
        for path in bad.checkpoints or ("(needed by none)",)
    ]
    lines = table(sorted(rows), ("CHECKPOINT", "CHUNK", "DAMAGE")) if rows else []
    lines += [f"{path}: cannot be read: {detail}" for path, detail in checked.unreachable]
    return lines + [f"{path}: a save that never ended" for path in checked.aborted]
