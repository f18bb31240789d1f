"""nvsnap-gpu-suspend gpus."""

from __future__ import annotations

from pathlib import Path

import click

from gpususpend import errors
from gpususpend.cli import options


@click.command("gpus", short_help="List the GPUs, or write them into a GPU map.")
@click.argument(
    "file", required=False, type=click.Path(dir_okay=False), metavar="[FILE]", callback=options.reachable
)
@options.common_options
def command(file: str | None, common: options.Common) -> None:
    """List the GPUs of this machine with what they use; with FILE, write a GPU map there.

    The map pairs every GPU with itself.  Replace the second column by the GPUs to resume on, and give the file to
    `resume --gpu-map`.

    \b
    Example:
      nvsnap-gpu-suspend gpus
      nvsnap-gpu-suspend gpus gpus.map
      nvsnap-gpu-suspend resume --gpu-map gpus.map 4711
    """
    with common.reporting("gpus") as report:
        from gpususpend import gpus
        from gpususpend.progress import readable_bytes
        from gpususpend.report import table

        with common.working(report) as context, options.listing(context) as source:
            found, usage = source.list(), source.usage()
        if file is not None:
            try:
                gpus.write_map(Path(file), found, common.apart())
            except OSError as error:
                raise errors.BadFile(path=file, detail=error.strerror) from None
        report.extra["gpus"] = [
            {
                "uuid": gpu.uuid, "index": gpu.index, "name": gpu.name, "total_bytes": gpu.total_bytes, "mig": gpu.mig,
                "used_bytes": usage[gpu.uuid].used_bytes, "pids": list(usage[gpu.uuid].pids),
            }
            for gpu in found
        ]  # fmt: skip
        rows = [
            (gpu.index, gpu.uuid, gpu.name, readable_bytes(usage[gpu.uuid].used_bytes), readable_bytes(gpu.total_bytes))
            for gpu in found
        ]
        report.lines += table(rows, ("#", "GPU", "NAME", "USED", "MEMORY"))
