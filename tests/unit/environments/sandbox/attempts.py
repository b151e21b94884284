"""Attempts to leave the sandbox, to be made inside: expressions that raise or return nothing if they are refused.

Together they are one program, which prints a JSON object: the result of each attempt, or null. A successful one does no
harm: nothing is written, no device opened, and calls that would change the machine get arguments that the kernel reads
only after it has checked the caller's rights. So the program can run outside too, to show that attempts can succeed.
"""

from __future__ import annotations

PROLOGUE = """
import ctypes, errno, json, os, platform, resource, signal, socket, stat, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
REMOVED_BY = {"shmget": libc.shmctl, "msgget": libc.msgctl}
outcomes = {}

def attempt(name, run):
    try:
        outcomes[name] = run() or None
    except (OSError, ValueError):
        outcomes[name] = None

def call(name, *arguments):
    # A system call. Another error than these would tell that the kernel looked at the arguments.
    number = NUMBERS[platform.machine()][name] if isinstance(name, str) else name
    result = libc.syscall(number, *arguments)
    if name in ("clone", "clone3") and result == 0:
        os._exit(0)  # the child; it would go on with the attempts, and print what they got a second time
    if name in REMOVED_BY and result >= 0:
        REMOVED_BY[name](result, 0, 0)  # System V's memory and queues outlive their process
    if result >= 0:
        return f"{name} gave {result}"
    if ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        return f"{name} answered {errno.errorcode[ctypes.get_errno()]}"

def can(run, *arguments):
    try:
        run(*arguments)
    except OSError:
        return False
    return True

def opened(path, flags=os.O_RDONLY):
    with open(os.open(path, flags | os.O_NONBLOCK), "rb" if flags == os.O_RDONLY else "wb", buffering=0) as file:
        return file.read(100) if flags == os.O_RDONLY else f"opened {path}"

def reading(*paths):
    return [path for path in paths if can(opened, path)]

def writable(*paths):
    return [path for path in paths if os.access(path, os.W_OK)]

def there(*paths):
    return [path for path in paths if os.path.lexists(path)]

def unix(path, kind=socket.SOCK_STREAM):
    with socket.socket(socket.AF_UNIX, kind) as client:
        client.connect(path)
        return client.send(b"from inside")

def paired(kind):
    return socket.socketpair(socket.AF_UNIX, kind)[0].sendto(b"from inside", outside["datagram"])

def processes(file, word):
    return [pid for pid in os.listdir("/proc") if pid.isdigit() and word in text(f"/proc/{pid}/{file}")]

def text(path):
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""

def memory_of_first():
    with open("/proc/1/maps") as maps, open("/proc/1/mem", "rb", buffering=0) as memory:
        for line in maps:
            first, last = (int(word, 16) for word in line.split()[0].split("-"))
            if " r" in line and "[v" not in line:
                memory.seek(first)
                if b"hunter2" in memory.read(last - first):
                    return line

def descriptors_of_first():
    links = [os.readlink(f"/proc/1/fd/{name}") for name in os.listdir("/proc/1/fd")]
    # bubblewrap's keeps what the code is read from, which nobody can change.
    harmless = ("/dev/null", "/memfd:code (deleted)")
    return [link for link in links if link.startswith(("socket:", "/")) and link not in harmless]

programs = [os.path.dirname(path) for path in (sys.executable, os.__file__)]
elsewhere = ["/", "/usr", "/usr/lib", "/usr/bin", "/etc", "/dev", "/proc", *programs]
sys_admin = struct.pack("=6I", 1 << 21, 1 << 21, 0, 0, 0, 0)
kernel = ["core_pattern", "hostname", "ns_last_pid", "randomize_va_space"]
"""

ATTEMPTS: dict[str, str] = {
    # Sockets
    "a socket in the file system": "unix(outside['socket'])",
    "a datagram socket in the file system": "unix(outside['datagram'], socket.SOCK_DGRAM)",
    "a datagram from a pair": "paired(socket.SOCK_DGRAM)",
    "a datagram from a raw pair": "paired(socket.SOCK_RAW)",
    "a pair of datagram sockets": "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "a raw pair": "socket.socketpair(socket.AF_UNIX, socket.SOCK_RAW)",
    "an abstract socket": "unix(outside['abstract'])",
    "vLLM's ipc socket": "unix(outside['zeromq'])",
    "vLLM's ipc socket through the first process": "unix('/proc/1/root' + outside['zeromq'])",
    "loopback": "socket.create_connection(('127.0.0.1', outside['port']), 1)",
    "loopback by datagram": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', outside['port']))",
    "another machine": "socket.create_connection(('192.0.2.1', 80), 1)",
    "the hypervisor by vsock": "socket.socket(40, socket.SOCK_STREAM)",
    "the kernel by netlink": "socket.socket(16, socket.SOCK_RAW)",
    "raw packets": "socket.socket(17, socket.SOCK_RAW)",
    "listening": "socket.create_server(('127.0.0.1', 0))",
    # Pipes and devices
    "a named pipe": "opened(outside['pipe'], os.O_WRONLY)",
    "a named pipe through the first process": "opened('/proc/1/root' + outside['pipe'], os.O_WRONLY)",
    "devices": "there(*outside['devices'])",
    "a device of its own": "os.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(254, 0)) is None",
    "the terminal": "there('/dev/tty', '/dev/ptmx', '/dev/console')",
    # Files
    "a secret": "opened(outside['secret'])",
    "a secret by a link": "os.symlink(outside['secret'], 'link') or opened('link')",
    "a secret through the first process": "reading(*(f'/proc/1/{at}{outside[\"secret\"]}' for at in ('root', 'cwd')))",
    "a secret upwards": "opened('../' * 20 + outside['secret'])",
    "accounts": "reading('/etc/passwd', '/etc/shadow', '/proc/1/root/etc/shadow')",
    "other folders": "there(*outside['folders'])",
    "writing elsewhere": "writable(*elsewhere)",
    "replacing a program": "writable(sys.executable, os.__file__, '/usr/bin/env')",
    "memory in its input": "os.ftruncate(0, 1 << 16) is None",
    "inherited descriptors": "[n for n in range(3, 64) if can(os.fstat, n) and not stat.S_ISCHR(os.fstat(n).st_mode)]",
    "shared memory": "there('/dev/shm/' + outside['shared'])",
    "a handle of a file": "call('open_by_handle_at', -100, ctypes.create_string_buffer(64), 0)",
    # Processes
    "the machine's processes": "processes('cmdline', outside['mark'])",
    "the environment of a process": "processes('environ', 'hunter2')",
    "its own environment": "[value for value in os.environ.values() if 'hunter2' in value]",
    "the first process's memory": "memory_of_first()",
    "the first process's descriptors": "descriptors_of_first()",
    "settings of the kernel": "writable(*('/proc/sys/kernel/' + name for name in kernel))",
    "the kernel's keys": "writable('/proc/sysrq-trigger', '/proc/sys/vm/drop_caches')",
    "staying when memory ends": "writable('/proc/self/oom_score_adj')",
    "a signal to a process": "os.kill(outside['victim'], 0) is None",
    "tracing the first process": "call('ptrace', 16, 1, 0, 0)",
    "reading a process": "call('process_vm_readv', outside['victim'], 0, 0, 0, 0, 0)",
    "writing a process": "call('process_vm_writev', outside['victim'], 0, 0, 0, 0, 0)",
    "a descriptor of a process": "call('pidfd_getfd', 1, 0, 0)",
    # Rights
    "being root": "os.setuid(0) is None",
    "root's group": "os.setgid(0) is None",
    "capabilities": "call('capset', struct.pack('=Ii', 0x20080522, 0), sys_admin)",
    "more memory": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1)) is None",
    "more processes": "resource.setrlimit(resource.RLIMIT_NPROC, (-1, -1)) is None",
    "more time": "resource.setrlimit(resource.RLIMIT_CPU, (-1, -1)) is None",
    "going first": "os.setpriority(os.PRIO_PROCESS, 0, -20) is None",
    "real time": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)) is None",
    # Other parts of the kernel
    "control groups": "there('/sys/fs/cgroup', '/proc/1/root/sys/fs/cgroup')",
    "io_uring": "call('io_uring_setup', 8, ctypes.create_string_buffer(120))",
    "keys": "call('keyctl', 0, -3, 0, 0, 0)",
    "a key of its own": "call('add_key', b'user', b'x', b'y', 1, -3)",
    "bpf": "call('bpf', 0, ctypes.create_string_buffer(64), 64)",
    "performance counters": "call('perf_event_open', ctypes.create_string_buffer(128), 0, -1, -1, 0)",
    "page faults": "call('userfaultfd', 0)",
    "modules": "call('init_module', 0, 0, b'')",
    "another kernel": "call('kexec_load', 0, 0, 0, 0xFFFF0000)",
    "rebooting": "call('reboot', 0, 0, 0, 0)",
    "the kernel's log": "call('syslog', 3, ctypes.create_string_buffer(100), 100)",
    "the machine's name": "call('sethostname', b'x', 1000)",
    "the clock": "call('settimeofday', 0, 0)",
    "swap": "call('swapon', b'/no/such', 0)",
    "a call that is not known yet": "call(900)",
    "a call of another ABI": "call(0x40000000 | 41, 1, 1, 0) if platform.machine() == 'x86_64' else None",
    # Memory that belongs to no process
    "a file in memory": "call('memfd_create', b'x', 0)",
    "System V memory of others": "call('shmat', outside['segment'], 0, 0)",
    "System V memory": "call('shmget', 0, 4096, 0o1600)",
    "System V queues": "call('msgget', 0, 0o1600)",
    "queues": "call('mq_open', b'x', 0o102, 0o600, 0)",
    # Namespaces and mounts; last, because they change the process
    "a user namespace": "call('unshare', 0x10000000)",
    "a mount namespace": "call('unshare', 0x00020000)",
    "a network namespace": "call('unshare', 0x40000000)",
    "a user namespace by clone": "call('clone', 0x10000000 | 17, 0, 0, 0, 0)",
    "a user namespace by clone3": "call('clone3', ctypes.create_string_buffer(88), 88)",
    "another's namespace": "call('setns', 0, 0)",
    "mounting": "call('mount', b'none', b'/tmp', b'no such kind', 0, 0)",
    "making /usr writable": "call('mount', b'none', b'/usr', 0, 32 | 4096, 0)",
    "making /usr writable anew": "call('mount_setattr', -100, b'/usr', 0, struct.pack('=4Q', 0, 1, 0, 0), 32)",
    "unmounting": "call('umount2', b'/tmp', 4)",
    "another root": "call('pivot_root', b'/usr', b'/')",
    "leaving by chroot": "os.mkdir('jail') or os.chroot('jail') or os.listdir('../../../..')",
    "a tree of mounts": "call('open_tree', -100, b'/', 0)",
    "a new file system": "call('fsopen', b'tmpfs', 0)",
}

_MORE_NUMBERS = {"clone": (56, 220), "clone3": (435, 435), "capset": (126, 91)}


def program(outside: dict[str, object], denied: dict[str, tuple[int | None, int | None]]) -> str:
    """Return the program; `outside` has the places of everything that must not be reached."""
    calls = denied | _MORE_NUMBERS
    machines = enumerate(("x86_64", "aarch64"))
    numbers = {machine: {name: pair[column] for name, pair in calls.items()} for column, machine in machines}
    lines = [PROLOGUE, f"NUMBERS = {numbers!r}", f"outside = {outside!r}"]
    lines += [f"attempt({name!r}, lambda: {code})" for name, code in ATTEMPTS.items()]
    return "\n".join([*lines, "print(json.dumps(outcomes, default=repr))"])
