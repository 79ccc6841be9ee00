"""Find the processes that belong to an operator's terminal: they are never a trainer and never signalled.

Everything here is pure and takes ``Process``. Three questions:

- ``interactive``: a shell that waits for commands, a REPL, a notebook kernel, an editor, a program that manages jobs on
  its terminal, or the unknown leader of a terminal's session.
- ``starter``: a program that starts others and does not train: init, sshd, tmux, cron, an editor's server, a container
  runtime. Also a shell without a terminal that reads its commands from a pipe.
- ``spared``: the processes of a tree that must not be signalled.

In doubt a process is interactive: the trainer below it is then a tree of its own, and stops without it.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Final, TypeAlias

from podwatch.domain.process import ProcessIdentity, ProcessRole
from podwatch.trainer.process_roles import program
from podwatch.trainer.process_tree import Process

_POSIX: Final = frozenset(
    {
        "sh",
        "bash",
        "rbash",
        "dash",
        "ash",
        "zsh",
        "ksh",
        "ksh93",
        "mksh",
        "oksh",
        "yash",
        "posh",
        "osh",
        "ysh",
        "busybox",
    }
)
_OTHER_SHELLS: Final = frozenset(
    {
        "fish",
        "csh",
        "tcsh",
        "nu",
        "pwsh",
        "powershell",
        "xonsh",
        "elvish",
        "ion",
        "murex",
        "rc",
        "es",
        "scsh",
        "git-shell",
    }
)
SHELLS: Final = _POSIX | _OTHER_SHELLS

_VALUES: Final[Mapping[str, frozenset[str]]] = {
    "": frozenset({"--init-file", "--rcfile", "--debugger-profile", "-o", "+o", "-O", "+O", "--emulate"}),
    "fish": frozenset(
        {"-C", "--init-command", "-d", "--debug", "-D", "--debug-stack-frames", "-o", "-f", "--features"}
    ),
    "nu": frozenset(
        {"-e", "--execute", "--config", "--env-config", "--plugin-config", "-I", "--include-path", "--log-level",
         "--log-target", "--log-file", "-m", "--table-mode", "-t", "--threads"}
    ),
    "pwsh": frozenset(
        {"-settingsfile", "-workingdirectory", "-wd", "-configurationname", "-custompipename", "-executionpolicy",
         "-ep", "-ex", "-inputformat", "-outputformat", "-windowstyle", "-version"}
    ),
    "xonsh": frozenset({"--rc", "-D", "--shell-type", "--timings"}),
    "elvish": frozenset({"-rc", "-log", "-db", "-sock"}),
}  # fmt: skip
"""Options whose value is the next argument, so that it is not taken for a script."""
_COMMAND: Final[Mapping[str, frozenset[str]]] = {
    "fish": frozenset({"--command"}),
    "nu": frozenset({"--commands"}),
    "pwsh": frozenset({"-command", "-c", "-file", "-f", "-encodedcommand", "-ec", "-e", "-commandwithargs", "-cwa"}),
    "elvish": frozenset(),
}
_LIVE: Final = frozenset({"-", "/dev/stdin", "/dev/tty", "/dev/fd/0", "/proc/self/fd/0"})
"""A "script" that is the shell's own standard input."""

_REPLS: Final = frozenset(
    {"ipython", "ipython3", "IPython", "ptpython", "ptipython", "bpython", "xpython", "node", "julia", "R", "irb",
     "ghci", "lua", "ruby", "perl", "sqlite3", "psql", "mysql"}
)  # fmt: skip
"""Interactive when they are given no file to run."""
_CONSOLES: Final = frozenset(
    {"ipykernel_launcher", "ipykernel", "colab_kernel_launcher", "xpython", "jupyter-console", "jupyter_console",
     "jupyter-qtconsole", "pdb", "ipdb", "pudb", "bdb", "pdb3"}
)  # fmt: skip
"""A notebook's kernel or a debugger's prompt: always used by an operator."""
_SCREENFUL: Final = frozenset(
    {"vim", "nvim", "vi", "view", "nano", "emacs", "emacsclient", "micro", "hx", "less", "more", "man", "top", "htop",
     "btop", "atop", "nvtop", "nvitop", "watch", "gdb", "cuda-gdb", "lldb", "mc", "ranger", "nnn", "yazi", "tig",
     "lazygit", "k9s", "lnav", "dialog", "whiptail", "fzf"}
)  # fmt: skip
"""Programs that fill or hold a terminal for an operator; without one (``watch`` in a script) they are ordinary."""

TERMINALS: Final = frozenset(
    {"tmux", "tmate", "screen", "zellij", "dtach", "abduco", "byobu", "sshd", "sshd-session", "sshd-auth", "dropbear",
     "mosh-server", "etserver", "ttyd", "gotty", "wetty", "shellinaboxd", "code", "code-server", "code-tunnel",
     "openvscode-server", "cursor", "cursor-server", "windsurf-server", "jupyter", "jupyter-lab", "jupyter-labhub",
     "jupyter-notebook", "jupyter-server", "jupyterhub-singleuser", "jupyterhub", "rstudio-server", "rserver",
     "rsession", "marimo", "xterm", "kitty", "alacritty", "konsole", "gnome-terminal-", "wezterm-mux-ser",
     "wezterm-gui", "login",
     "agetty", "getty"}
)  # fmt: skip
"""Programs that serve terminals or notebooks; an operator uses the processes below them."""
_STARTERS: Final = TERMINALS | frozenset(
    {"systemd", "init", "openrc-init", "launchd", "su", "sudo", "doas", "runuser", "pkexec", "dockerd", "docker",
     "docker-init", "containerd", "containerd-shim", "containerd-shim-runc-v2", "podman", "conmon", "runc", "crun",
     "youki", "nsenter", "kubectl", "kubelet", "tini", "dumb-init", "catatonit", "s6-supervise", "s6-svscan", "runsv",
     "runsvdir", "supervisord", "monit", "cron", "crond", "anacron", "atd", "slurmstepd", "slurmd", "script",
     "asciinema", "expect", "unbuffer", "node", "podwatch", "reptyr", "ssh", "tailscaled", "teleport", "sshpass"}
)  # fmt: skip
_MODULES: Final = frozenset({"jupyterlab", "notebook", "jupyter_server", "jupyter", "jupyterhub", "podwatch", "marimo"})
"""The same, as ``python -m NAME``."""
_CUT: Final = 15
"""The kernel cuts a process's name to this many characters."""
_STARTERS_CUT: Final = _STARTERS | {name[:_CUT] for name in _STARTERS if len(name) > _CUT}
_TERMINALS_CUT: Final = TERMINALS | {name[:_CUT] for name in TERMINALS if len(name) > _CUT}
ProcessKey: TypeAlias = tuple[ProcessIdentity, tuple[str, ...]]
"""A process and the command that it runs."""


def shell_of(process: Process) -> str:
    """Return the name of the shell that this is; empty for other programs. Judged by executable, process name or argv:
    ``exec -a anything bash`` is a shell, and so is ``-bash``."""
    first = process.argv[0] if process.argv else ""
    exe = _base(process.exe)
    for name in (exe, process.name.lstrip("-"), _base(first).lstrip("-")):
        if name == "busybox":
            applet = process.argv[1] if _base(first) == "busybox" and len(process.argv) > 1 else _base(first)
            return "sh" if applet.lstrip("-") in ("sh", "ash", "hush") else ""
        if name in SHELLS and not (exe and name != exe and _runs_scripts(exe)):
            return name
    scripted, _ = program(process.argv)
    return "xonsh" if scripted == "xonsh" else ""


def _runs_scripts(exe: str) -> bool:
    """A Python program may call itself "rc" or "es"; what the kernel runs decides."""
    return exe.startswith(("python", "pypy")) or exe in ("uv", "node", "perl", "ruby")


def has_script(shell: str, argv: tuple[str, ...]) -> bool:
    """Return whether this shell runs a script or a ``-c`` command and ends with it: it reads no commands from a
    terminal."""
    words = argv[2:] if argv and _base(argv[0]) == "busybox" else argv[1:]
    if shell == "xonsh" and (name := next((n for n, w in enumerate(argv) if _base(w).startswith("xonsh")), None)):
        words = argv[name + 1 :]
    if shell in ("pwsh", "powershell"):
        lowered = [word.lower() for word in words]
        if any(word in ("-noexit", "-noe", "-interactive", "-i") for word in lowered):
            return False
        shell, words = "pwsh", tuple(lowered)
    values = _VALUES.get(shell, _VALUES[""])
    commands = _COMMAND.get(shell, frozenset())
    if shell == "nu" and any(word.startswith(("-e", "--execute")) for word in words):
        return False
    n, command, reads_stdin = 0, False, False
    while n < len(words):
        word = words[n]
        if word in values:
            n += 2
            continue
        if word in ("--", "-"):
            n += 1
            break
        if word in commands or word.partition("=")[0] in commands:
            return True
        if word.startswith(("--", "+")) or (shell == "pwsh" and word.startswith("-")):
            n += 1
            continue
        if word.startswith("-"):
            command = command or "c" in word[1:]
            reads_stdin = reads_stdin or "s" in word[1:]
            n += 1
            continue
        break
    if n >= len(words):
        return False
    return command or (not reads_stdin and words[n] not in _LIVE)


def interactive(process: Process, children: Iterable[Process] = ()) -> bool:
    """Return whether an operator uses it, or may (see above). ``children`` are its direct children."""
    terminal = process.tty != 0
    name, arguments = program(process.argv)
    if name in _CONSOLES:
        return True
    if shell := shell_of(process):
        if has_script(shell, process.argv):
            return terminal and _manages_jobs(process, children, several=True)
        return terminal and not _reads_a_file(process)
    if _repl(process, name, arguments):
        return True
    if not terminal:
        return False
    if process.name in _SCREENFUL or name in _SCREENFUL:
        return True
    titled = process.role is not ProcessRole.OTHER
    trains = titled or bool(process.cuda) or bool(process.writes)
    python = _is_python(process)
    if not (trains or python) and process.session == process.pid and not _has_argument(process.argv):
        return True
    return not process.launcher_like and _manages_jobs(process, children, several=not (trains or python))


def starter(process: Process, children: Iterable[Process] = ()) -> bool:
    """Return whether no trainer's tree includes it: it is interactive, or starts other programs and does not train.
    Judged by name, not by position: a process from ``docker exec`` has no parent here (0), and an image's entry point
    can be the trainer."""
    if process.above_us or interactive(process, children):
        return True
    if _named(process, _STARTERS_CUT) or program(process.argv)[0] in _MODULES:
        return True
    shell = shell_of(process)
    return bool(shell) and not has_script(shell, process.argv) and not _reads_a_file(process)


def terminal_server(process: Process) -> bool:
    """Return whether it serves terminals: tmux, sshd, Jupyter, an editor's server."""
    return _named(process, _TERMINALS_CUT) or program(process.argv)[0] in _MODULES - {"podwatch"}


def keeps(process: Process) -> bool:
    """Return whether it is a supervisor, whatever started podwatch."""
    return "keep" in process.argv and any(_base(word) in ("supervise.py", "supervise.pyc") for word in process.argv)


def copied(marked: Collection[int], processes: Collection[Process]) -> frozenset[int]:
    """Return the pids among ``marked`` (those with a trainer's environment) that an operator gave it, to repeat or
    debug what the trainer did. ``processes``: all of the pod. The topmost marked process decides: it is on a terminal
    or interactive, was executed into the container, or an operator's shell or terminal server is above it. Above an
    orphan of a trainer is only PID 1 or another process that adopts."""
    by_pid = {p.pid: p for p in processes}
    below = children_of(processes)
    wanted = frozenset(marked)

    def of_operator(process: Process) -> bool:
        chain = [process, *_above(process, by_pid)]
        last = max(n for n, one in enumerate(chain) if one.pid in wanted)
        top = chain[last]
        if top.pid == 1:
            return False
        if top.parent_pid == 0 or top.tty != 0 or interactive(top, below.get(top.pid, ())):
            return True
        for one in chain[last + 1 :]:
            if one.pid == 1 or program(one.argv)[0] == "podwatch" or keeps(one):
                break
            if interactive(one, below.get(one.pid, ())):
                return True
            if one.above_us:  # podwatch's own parent adopts
                break
            if terminal_server(one):
                return True
        return False

    return frozenset(pid for pid in wanted if pid in by_pid and of_operator(by_pid[pid]))


def find_interactive(processes: Iterable[Process]) -> frozenset[int]:
    """Return the pids of all interactive processes."""
    listed = tuple(processes)
    below = children_of(listed)
    return frozenset(p.pid for p in listed if interactive(p, below.get(p.pid, ())))


def spared(
    processes: Collection[Process], users: frozenset[int] | None = None, *, known: ProcessKey | None = None
) -> frozenset[int]:
    """Return the pids of an attached tree that must not be signalled: interactive processes and those of other users,
    with everything below them, and their terminal server. ``known`` is the top of the tree when podwatch attached:
    while it runs the same command it is the trainer, whatever it looks like."""
    below = children_of(processes)
    by_pid = {p.pid: p for p in processes}
    found: set[int] = set()
    queue = [
        p.pid
        for p in processes
        if (p.identity, p.argv) != known and (interactive(p, below.get(p.pid, ())) or not of_users(p, users))
    ]
    roots = tuple(queue)
    while queue:
        pid = queue.pop()
        if pid not in found:
            found.add(pid)
            queue.extend(child.pid for child in below.get(pid, ()))
    for pid in roots:
        found.update(p.pid for p in _above(by_pid[pid], by_pid) if terminal_server(p))
    return frozenset(found)


def served(processes: Collection[Process]) -> frozenset[int]:
    """Return the pids of a supervisor's tree that must not be signalled. By descent all of it is ours, including shells
    in the trainer's sandbox. The exception is an operator's terminal, if the command started a terminal server (tmux,
    Jupyter): the interactive shell, everything below it, and the server."""
    by_pid = {p.pid: p for p in processes}
    servers = {p.pid for p in processes if terminal_server(p)}
    if not servers:
        return frozenset()
    found: set[int] = set()
    for pid in spared(processes):
        above = [p.pid for p in _above(by_pid[pid], by_pid)]
        if pid in servers or servers.intersection(above):
            found.add(pid)
    return frozenset(found)


def _above(process: Process, by_pid: Mapping[int, Process]) -> list[Process]:
    found: list[Process] = []
    parent = by_pid.get(process.parent_pid)
    while parent is not None and parent not in found:
        found.append(parent)
        parent = by_pid.get(parent.parent_pid)
    return found


def of_users(process: Process, users: frozenset[int] | None) -> bool:
    """Return whether its real and its effective user are among ``users`` (None: any). An unknown user is not."""
    return users is None or (bool(process.users) and users.issuperset(process.users))


def children_of(processes: Iterable[Process]) -> dict[int, list[Process]]:
    found: dict[int, list[Process]] = {}
    for process in processes:
        if process.parent_pid != process.pid:
            found.setdefault(process.parent_pid, []).append(process)
    return found


def _manages_jobs(process: Process, children: Iterable[Process], *, several: bool) -> bool:
    """Job control: it gave its terminal to a child's process group, or (with ``several``) keeps several groups in its
    session. ``setsid`` children, as torchrun makes them, are in sessions of their own and do not count."""
    groups = {c.group for c in children if c.session == process.session and c.group not in (0, process.group)}
    return process.foreground in groups or (several and len(groups) > 1)


def _reads_a_file(process: Process) -> bool:
    """``bash < train.sh``: the commands come from a file, and no ``-i`` asks for a prompt."""
    if any(re.fullmatch(r"-[a-zA-Z]*i[a-zA-Z]*|--login|--interactive", word) for word in process.argv[1:]):
        return False
    target = process.stdin
    return target.startswith("/") and not target.startswith("/dev/")


def _repl(process: Process, name: str, arguments: tuple[str, ...]) -> bool:
    exe = _base(process.exe)
    if _is_python(process):
        options = process.argv[1 : _first_file(process.argv) + 1]
        if any(re.match(r"-[a-bd-ln-zA-VY-Z]*i", word) for word in options):
            return True
        if name in _REPLS:
            return _prompts(process, name, arguments)
        if _first_file(process.argv) < len(process.argv):
            return False
        return process.tty != 0 and (not process.stdin or process.stdin.startswith(("/dev/pts/", "/dev/tty")))
    if name in _REPLS or exe in _REPLS or process.name in _REPLS:
        return _prompts(process, name, arguments)
    return False


def _prompts(process: Process, name: str, arguments: tuple[str, ...]) -> bool:
    """A REPL without a file to run; IPython's kind also where ``-i`` keeps it after the file."""
    asks = any(word in ("-i", "--interactive") for word in arguments)
    no_file = all(word.startswith("-") for word in arguments)
    return asks or (no_file and (process.tty != 0 or "ython" in name))


def _first_file(argv: tuple[str, ...]) -> int:
    """Return the index at which a Python command line names what it runs (file, ``-m`` or ``-c``, ``-``); its length if
    nowhere."""
    n = 1
    while n < len(argv):
        word = argv[n]
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            n += 2
            continue
        if not word.startswith("-") or re.match(r"-[a-zA-Z]*[cm]", word):
            return n
        n += 1
    return len(argv)


def _is_python(process: Process) -> bool:
    """By its first argument; a title (``setproctitle``) is none."""
    first = _base(process.argv[0] if process.argv else "").lstrip("-")
    return re.fullmatch(r"(python|pypy)[\d.]*t?", first) is not None


def _has_argument(argv: tuple[str, ...]) -> bool:
    """Whether it was given something to run: an argument that is neither an option nor the value of one."""
    words = argv[1:]
    return any(
        not word.startswith("-") and not (n and words[n - 1].startswith("-") and "=" not in words[n - 1])
        for n, word in enumerate(words)
    )


def _named(process: Process, names: frozenset[str]) -> bool:
    first = process.argv[0] if process.argv else ""
    said = {process.name.lstrip("-").split(":")[0], process.name.lstrip("-").lower(), _base(process.exe)}
    said |= {program(process.argv)[0], _base(first).split(":")[0].lstrip("-")}
    return any(name in names for name in said if name)


def _base(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
