"""`urdir serve`: access, limits and log, from the flags."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from urdir.model.commands import prompts
from urdir.model.commands.options import UsageError

if TYPE_CHECKING:
    from urdir.model.serve.access import Access, Tls
    from urdir.model.serve.limits import Limits
    from urdir.model.serve.logs import LogSettings

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def access(args: argparse.Namespace) -> Access:
    """Return who may ask. Raises UsageError for empty keys and half a certificate."""
    from urdir.model.serve.access import Access

    keys = [key.strip() for given in args.api_key for key in given.split(",")]
    if not all(keys):
        raise UsageError("--api-key is empty: leave it out for no key")
    if args.api_key_file is not None:
        lines = prompts.read_text("--api-key-file", args.api_key_file).split("\n")
        read = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
        if not read:
            raise UsageError(f"--api-key-file {args.api_key_file}: it has no keys")
        keys += read
    return Access(tuple(keys), tuple(args.cors), _hosts(args), args.page, _tls(args))


def _tls(args: argparse.Namespace) -> Tls | None:
    from urdir.model.serve.access import Tls

    certificate, key = args.ssl_cert_file, args.ssl_key_file
    if (certificate is None) != (key is None):
        raise UsageError("--ssl-cert-file and --ssl-key-file: give both, or put a proxy before it")
    return None if certificate is None else Tls(certificate, key)


def limits(args: argparse.Namespace) -> Limits:
    """Return limits of connections: ``--timeout``."""
    from urdir.model.serve.limits import Limits

    return Limits(stalled_seconds=args.timeout, silent_seconds=args.timeout)


def logs(args: argparse.Namespace) -> LogSettings:
    """Return settings of the log and of spans. Raises UsageError for an endpoint that is no URL."""
    from urdir.model.serve.logs import LogSettings

    endpoint = args.otlp_endpoint
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise UsageError(
            f"--otlp-endpoint {endpoint}: expected a URL such as http://localhost:4318"
        )
    return LogSettings(args.log_format, args.log_file, args.verbose, otlp=endpoint)


def _hosts(args: argparse.Namespace) -> frozenset[str] | None:
    """Host names that browsers may use for this server; None: any."""
    is_local = args.host in ("localhost", "::1") or args.host.startswith("127.")
    if not is_local and not args.allowed_host:
        return None
    own = f"[{args.host}]" if ":" in args.host else args.host
    return frozenset(name.lower() for name in (*_LOOPBACK, own, *args.allowed_host))
