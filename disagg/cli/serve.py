"""Serve one or more models over HTTP, on a local Ray instance or on a running Ray cluster."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from disagg.cli import process_tree
from disagg.cli.lines import Lines
from disagg.cli.reports import Order
from disagg.cli.serve_arguments import add_arguments
from disagg.cli.serve_config import layers_of
from disagg.cli.supervisor import Ended, Signals, Supervisor, keep_serving
from disagg.config import ServeConfig
from disagg.errors import StartupError
from disagg.host import user_directory
from disagg.models.fetched import Say
from disagg.models.hub import fetch_model

NUM_KEPT_LOGS = 10  # runs whose logs are kept if --log-dir is not given

__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Start everything, print a ready line, serve until SIGINT or SIGTERM, stop everything.

    A server that breaks meanwhile is started again.
    """
    signals = Signals()
    layers = layers_of(arguments)
    raw, config = layers.raw, layers.config()
    logs = log_directory(arguments.log_dir, config.http.port)
    lines = Lines(arguments.log_format, logs / "disagg.log")
    with contextlib.closing(lines):
        ended = process_tree.end_dead_runs()
        if ended:
            names = sorted({each.name for each in ended})
            lines.say(
                "orphans_ended",
                f"Ended {len(ended)} processes that a killed run left behind: {', '.join(names)}.",
            )
        lines.say("logs", f"logs: {logs}", directory=str(logs))
        if not _fetch_models(config, lines.say, lambda: signals.num > 0):
            return 0
        directory, alive = process_tree.new_run()
        order = Order(
            config=_with_files(config, directory) if arguments.ray_address is None else config,
            raw_config=raw,
            directory=str(directory),
            log_directory=str(logs),
            ray_address=arguments.ray_address,
            haproxy=arguments.haproxy,
            replace=arguments.replace,
        )

        def serve_once() -> Ended:
            return Supervisor(order, lines, signals).run()

        try:
            # A cluster of others keeps the application when this command fails.
            if arguments.restart and order.ray_address is None:
                return keep_serving(serve_once, lines, lambda: signals.num > 0)
            return serve_once().status
        finally:
            process_tree.end_family()  # HAProxy, which outlives servers that broke
            shutil.rmtree(directory, ignore_errors=True)
            os.close(alive)


def _with_files(config: ServeConfig, directory: Path) -> ServeConfig:
    """The configuration with a directory for files and batches, which ends with the run."""
    files = config.http.files_directory or str(directory / "files")
    return replace(config, http=replace(config.http, files_directory=files))


def _fetch_models(config: ServeConfig, say: Say, is_stopped: Callable[[], bool]) -> bool:
    """Download the models that are not on this machine yet.

    Returns:
        False if the user stopped it.

    Raises:
        StartupError: a model cannot be downloaded.
    """
    wanted = [named for each in config.tiers for named in each.models]
    return all(fetch_model(*named, say, is_stopped) for named in wanted)


def log_directory(log_dir: str | None, port: int) -> Path:
    """The directory for a run's logs: `log_dir`, or a new one beside those of the last runs.

    Raises:
        StartupError: the directory cannot be written to.
    """
    if log_dir is not None:
        directory = Path(os.path.expanduser(log_dir)).absolute()
        if not _is_made(directory):
            raise StartupError(
                f"Cannot write to {log_dir}; choose another directory for the logs.",
                param="log_dir",
            )
        return directory
    elsewhere = process_tree.temporary_directory() / f"disagg-logs-{os.getuid()}"
    state = user_directory("XDG_STATE_HOME", ".local/state")
    bases = [elsewhere] if state is None else [state / "disagg", elsewhere]
    now = datetime.datetime.now().strftime("%Y-%m-%d-%H%M%S")
    name = f"serve-{now}-{port}-{os.getpid()}"
    for base in bases:
        if (base != elsewhere or _is_private(base)) and _is_made(base / name):
            for old in sorted(base.glob("serve-*"))[:-NUM_KEPT_LOGS]:
                shutil.rmtree(old, ignore_errors=True)
            return base / name
    raise StartupError(
        f"Cannot write logs to {' or to '.join(str(base.parent) for base in bases)}; give a"
        " directory with --log-dir.",
        param="log_dir",
    )


def _is_private(directory: Path) -> bool:
    """Make a directory for this user alone, and check that no other user had made it before."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _is_made(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "disagg.log").touch()
    except (OSError, RuntimeError):
        return False
    return True
