"""The options of the server, checked before a worker is started."""

import argparse
import contextlib
import errno
import ipaddress
import os
import resource
import socket
import tempfile
import warnings
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path

from qwen3_tts_cuda_graphs.common.command import check_device_name, install_command
from qwen3_tts_cuda_graphs.common.model_config import quick_config
from qwen3_tts_cuda_graphs.common.model_names import model_name, split_name
from qwen3_tts_cuda_graphs.common.parser import Parser
from qwen3_tts_cuda_graphs.common.published import CLONING_MODEL, MODELS, PRESET_MODEL
from qwen3_tts_cuda_graphs.common.quick_start import keep_bytecode
from qwen3_tts_cuda_graphs.common.voice_files import check_speaker_file
from qwen3_tts_cuda_graphs.prompts.checks import check_number
from qwen3_tts_cuda_graphs.serving.settings import (
    API_KEY_VARIABLE,
    LIMITS,
    MAX_PENDING,
    Settings,
    check_host,
    check_origin,
)
from qwen3_tts_cuda_graphs.serving.spare_worker import Spare

PACKAGES = "starlette", "uvicorn", "httptools", "websockets", "pydantic", "prometheus_client", "python_multipart"
PRIORITY = -10  # nice value
OTHER_FILES = 42  # open files other than connections: sockets of workers, pipes, voices


def run() -> None:
    args = parse_arguments()
    settings = make_settings(args)
    check_folder(args.voices)
    for path in args.speaker:
        check_speaker_file(path)
    remedy = f"in a checkout run ./setup.sh none --server, else {install_command('qwen3-tts-cuda-graphs[server]')}"
    for name in PACKAGES:
        if find_spec(name) is None:
            raise ValueError(f"the server needs {name}, which is not installed: {remedy}")
    for _, name in map(split_name, args.model):  # before the slow imports, and without access to the hub
        check_number(quick_config(name), "max_seq_len", settings.max_seq_len)
    with open_port(args.host, args.port) as listening:
        settings = keep_to_this_machine(listening, settings)
        raise_priority()
        settings = keep_to_file_limit(settings)
        keep_bytecode()
        spare = Spare()
        spare.start("worker", args.device or "cuda")
        try:
            from qwen3_tts_cuda_graphs.serving.server import serve

            serve(args, settings, listening, spare)
        finally:
            spare.close()


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """words: by default those of the command line"""
    description = "Serve speech over HTTP and WebSocket."
    parser = Parser(prog="qwen3-tts serve", description=description, allow_abbrev=False)  # --voice is not --voices
    parser.add_argument(
        "--model",
        action="append",
        type=model_name,
        help=", ".join(MODELS)
        + f", a hub id, a folder or name=folder; may be given several times. Default: {PRESET_MODEL}, or "
        f"{CLONING_MODEL} with --speaker",
    )
    parser.add_argument("--device", help="cuda, cuda:1, cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets other machines in: set --api-key, too")
    parser.add_argument("--port", default=8000, type=int, help="0 takes a free one")
    parser.add_argument(
        "--api-key", help=f"guards all but /health, /livez, /docs and /page.*; default: ${API_KEY_VARIABLE}"
    )
    parser.add_argument(
        "--cors-origin", action="append", default=[], help="web pages of this origin may call the server, or *"
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        help="another name of this machine, for containers and proxies; requests to other names are refused then",
    )
    parser.add_argument("--open-lists", action="store_true", help="list voices and models without the key")
    parser.add_argument(
        "--exit-when-failed", action="store_true", help="end with status 1 when an engine is given up, to be restarted"
    )
    parser.add_argument("--voices", type=Path, default=Settings.voices, help="folder of the registered voices")
    parser.add_argument("--lexicon", type=Path, help="a file of lines: a word, a tab, and how to say it")
    parser.add_argument(
        "--speaker",
        type=Path,
        action="append",
        default=[],
        help="a speaker.pt of the first Base model; its voice has the file's name",
    )
    limits = parser.add_argument_group("limits")
    for item in LIMITS:
        option = "--" + item.name.replace("_", "-")
        kind, help_text = int, item.metadata["help"]
        if item.default is not None:
            kind, help_text = type(item.default), f"{help_text} ({item.default:.12g})"
        limits.add_argument(option, type=kind, default=item.default, help=help_text)
    args = parser.parse_args(words)
    args.model = args.model or [CLONING_MODEL if args.speaker else PRESET_MODEL]
    check_device_name(args.device)
    if not 0 <= args.port < 65536:
        raise ValueError(f"--port is {args.port}, it must be from 0 to 65535")
    return args


def make_settings(args: argparse.Namespace) -> Settings:
    """Most options have the same name as their field of Settings."""
    given = {item.name: getattr(args, item.name) for item in fields(Settings) if item.name in args}
    given["api_key"] = os.environ.get(API_KEY_VARIABLE) if args.api_key is None else args.api_key
    given["cors_origins"] = tuple(map(check_origin, args.cors_origin))
    given["hosts"] = tuple(map(check_host, args.allow_host))
    return Settings(**given)


def check_folder(folder: Path) -> None:
    """Raises if the folder cannot be created or written to. This writes a test file, as permissions do not tell: root
    has them in /proc, too."""
    try:
        target = Path(os.path.realpath(folder))
        existing = next(path for path in (target, *target.parents) if path.exists())
        if folder.is_symlink() and existing != target:
            raise NotADirectoryError(errno.ENOTDIR, "it is a link to nothing")
        with tempfile.TemporaryDirectory(dir=existing, prefix=".voices-"):
            pass
    except OSError as error:
        raise ValueError(f"the voices cannot be kept in {folder}: {error.strerror}: choose another --voices") from None


def keep_to_this_machine(listening: socket.socket, settings: Settings) -> Settings:
    """Without a key, a server that listens on a loopback address accepts no other host names. On others, it warns."""
    if settings.api_key is not None:
        return settings
    host = listening.getsockname()[0]
    if ipaddress.ip_address(host).is_loopback:
        return replace(settings, only_this_machine=True)
    warnings.warn(f"--host {host} without --api-key: whoever reaches this machine can use the server", stacklevel=2)
    return settings


def open_port(host: str, port: int) -> socket.socket:
    """Listen on the port before the model is loaded. Connections wait until the server runs."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio sets TCP_NODELAY only if the protocol is given. Without it the first audio may wait 40 ms for an ACK.
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # the kernel buffers about 10 s of audio, not megabytes
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, 1 << 19)
        listening.bind(address)
        listening.listen(MAX_PENDING)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not the name of a host"
        raise ValueError(f"cannot listen on {host}:{port}: {reason}: choose another --host or --port") from None
    return listening


def raise_priority() -> None:
    """Take precedence over other programs: streams underrun within milliseconds. The workers inherit the priority."""
    with contextlib.suppress(OSError):  # needs root
        os.setpriority(os.PRIO_PROCESS, 0, min(PRIORITY, os.getpriority(os.PRIO_PROCESS, 0)))


def raise_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # some systems refuse their own hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def keep_to_file_limit(settings: Settings) -> Settings:
    """Accept fewer connections if the limit of open files is too low for `max_connections`. Without a free file
    descriptor, a connection cannot even be refused, and no worker can be started."""
    raise_file_limit()
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = max((files - OTHER_FILES) * 4 // 5, 1)  # a quarter more are accepted and get a 503
    if files == resource.RLIM_INFINITY or settings.max_connections <= room:
        return settings
    warnings.warn(f"ulimit -n is {files}: --max-connections is {room}, not {settings.max_connections}", stacklevel=2)
    return replace(settings, max_connections=room)
