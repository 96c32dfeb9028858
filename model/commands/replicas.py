"""`urdir serve --ray`: replicas of the server on a Ray cluster, of this machine or of many."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from urdir.model.commands import values
from urdir.model.commands.options import UsageError
from urdir.model.environment import read_environment
from urdir.model.errors import ModelError, UnsupportedError

if TYPE_CHECKING:
    from ray.serve import Application

    from urdir.driver.device_name import DeviceName
    from urdir.model.commands.parser import Parser
    from urdir.model.serve.access import Access
    from urdir.model.serve.interface import AsyncService
    from urdir.model.serve.limits import Limits

    Server = tuple[Callable[[], AsyncService], Access, Limits]

_NAME = "urdir"  # of the application, where the cluster has others
#: Requests of a replica at once, where -np leaves them open: on a GPU, on the emulator.
_BUSY = {True: 256, False: 8}


def add_flags(parser: Parser) -> None:
    """--ray, --replicas, --router."""
    group = parser.add_argument_group(
        "replicas on Ray",
        "Every host has the model at the same path, or takes it from the hub.",
    )
    group.add_argument(
        "--ray",
        action="store_true",
        help="serve from the Ray cluster of $RAY_ADDRESS or of this machine, else from a new one",
    )
    group.add_argument(
        "--replicas",
        type=values.number_or_span,
        metavar="N|MIN-MAX",
        help="how many, or as many of these as the requests need; --gpus are those of each (1)",
    )
    group.add_argument(
        "--router",
        metavar="CLASS",
        help="import path of Ray's request router (default: Ray's, the less busy of two)",
    )


#: Flags of the server here; with Ray its own server answers.
_NOT_WITH_RAY = (
    "ssl-cert-file",
    "ssl-key-file",
    "drain",
    "log-file",
    "log-format",
    "otlp-endpoint",
)


def check_flags(args: argparse.Namespace) -> None:
    """Raise UsageError for flags that do not go together."""
    own = [flag for flag in _NOT_WITH_RAY if getattr(args, flag.replace("-", "_")) is not None]
    if not args.ray:
        for flag in ("replicas", "router"):
            if getattr(args, flag) is not None:
                raise UsageError(f"--{flag} is for replicas on Ray: add --ray")
    elif own:
        raise UsageError(f"--{own[0]} with --ray: Ray's own server does that, leave it out")
    elif args.exit_on_device_loss:
        raise UsageError("--exit-on-device-loss with --ray: Ray replaces such replicas itself")
    elif isinstance(args.gpus, tuple):
        raise UsageError("--gpus by number with --ray: Ray chooses them, give how many")
    elif (device := _device(args)).index:
        raise UsageError(f"device {device} with --ray: Ray chooses the GPU, give cuda")
    elif not args.port:
        raise UsageError("--port 0 with --ray: give the port that Ray is to listen on")


def check_ray() -> None:
    """Raise UnsupportedError without Ray."""
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(f"{error}: pip install 'urdir[ray]'") from None


def application(args: argparse.Namespace, server: Server) -> Application:
    """What Ray Serve runs for the flags; a cluster is connected."""
    import ray

    from urdir.model.serve.replicas import Scale, application

    least, most = args.replicas or (1, 1)
    kind = _device(args).kind
    on_gpus = kind == "cuda" or (kind == "auto" and "GPU" in ray.cluster_resources())
    scale = Scale(
        least=least,
        most=most,
        busy=args.parallel or _BUSY[on_gpus],
        gpus=(args.gpus or 1) if on_gpus else 0,
        router=args.router,
    )
    try:
        return application(*server, scale)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"--router {args.router}: {error}") from None


def _device(args: argparse.Namespace) -> DeviceName:
    from urdir.driver.device_name import DeviceName

    return DeviceName.parse(args.device or read_environment().device)


class Cluster:
    """A Ray cluster that is connected, and listens; a context manager. Raises ModelError where it
    cannot listen."""

    def __init__(self, args: argparse.Namespace) -> None:
        import ray
        from ray import serve
        from ray.serve.config import HTTPOptions
        from ray.serve.schema import LoggingConfig

        level = "INFO" if args.verbose else "WARNING"
        logging.getLogger("ray.serve").setLevel(level)
        ray.init(logging_level=level, log_to_driver=args.verbose)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's would end at once
        self._logging = LoggingConfig(log_level=level, enable_access_log=args.verbose)
        http = HTTPOptions(host=args.host, port=args.port, keep_alive_timeout_s=args.timeout)
        try:
            serve.start(http_options=http, logging_config=self._logging)
        except RuntimeError as error:
            ray.shutdown()
            raise ModelError(f"Ray does not listen: {_last_line(str(error))}") from None

    def serve(self, application: Application, on_start: Callable[[], None]) -> None:
        """Run it until Ctrl-C, then let it answer what is open. Raises ModelError where no replica
        starts."""
        from ray import serve

        try:
            serve.run(application, name=_NAME, logging_config=self._logging)
        except RuntimeError as error:
            raise ModelError(f"Ray starts no replica: {_why() or error}") from None
        on_start()
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print("\nopen requests are answered; Ctrl-C again ends them", file=sys.stderr)
            serve.delete(_NAME)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        import ray

        ray.shutdown()


def _why() -> str:
    """What the last replica raised that did not start."""
    from ray import serve

    found = serve.status().applications.get(_NAME)
    return _last_line(*(each.message for each in found.deployments.values())) if found else ""


def _last_line(*tracebacks: str) -> str:
    lines = "\n".join(tracebacks).split("\n")
    return next((line for line in reversed(lines) if line.strip()), "")
