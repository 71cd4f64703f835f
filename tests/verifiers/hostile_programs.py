"""Programs that try to leave the sandbox, to exhaust the machine or to pass without a solution."""

from __future__ import annotations

_LIBC = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def failed(result): print("contained" if result == -1 else "escaped")
"""
_TRY = """
import os, sys
def attempts(*calls):
    for call in calls:
        try:
            call()
        except (OSError, ValueError, NotImplementedError):
            continue
        print("escaped by call", calls.index(call))
        return
    print("contained")
"""

# Programs that print "contained" if the attack fails. Standard input is: a port, a process, a path and a marker of the host.
ATTACKS: dict[str, str] = {
    "connects to a server of the host": _TRY
    + """
import socket
port = int(input())
attempts(lambda: socket.create_connection(("127.0.0.1", port), 1), lambda: socket.create_connection(("1.1.1.1", 53), 1))
""",
    "resolves a name": _TRY + "import socket\nattempts(lambda: socket.getaddrinfo('example.com', 80))",
    "opens sockets of other families": _TRY
    + """
import socket
families = (socket.AF_INET, socket.AF_INET6, socket.AF_PACKET, socket.AF_NETLINK, socket.AF_VSOCK)
attempts(*[lambda f=f: socket.socket(f, socket.SOCK_DGRAM) for f in families])
""",
    "connects to an abstract socket of the host": _TRY
    + """
import socket
marker = sys.stdin.read().split()[3]
attempts(lambda: socket.socket(socket.AF_UNIX).connect("\\0" + marker))
""",
    "kills a process of the host": _TRY
    + """
process = int(sys.stdin.read().split()[1])
attempts(lambda: os.kill(process, 9), lambda: os.kill(process, 0), lambda: os.killpg(process, 9))
""",
    "reads the host's files": _TRY
    + """
path = sys.stdin.read().split()[2]
names = (path, "/etc/passwd", "/etc/shadow", "/etc/hostname", "/root", "/home", "/var", "/run", "/sys", "/boot", "/work")
attempts(*[lambda n=n: os.stat(n) for n in names])
""",
    "reads environment variables": """
import os
print("contained" if not any("SECRET" in name or "TOKEN" in name for name in os.environ) and len(os.environ) < 9 else "escaped")
""",
    "reads /proc of other processes": _TRY
    + "attempts(lambda: os.listdir('/proc'), lambda: open('/proc/1/environ'), lambda: open('/proc/self/mem'))",
    "traces its parent": _LIBC + "failed(libc.ptrace(16, os.getppid(), 0, 0))",
    "reads the memory of its parent": _LIBC + "failed(libc.process_vm_readv(os.getppid(), None, 0, None, 0, 0))",
    "mounts a file system": _LIBC + "os.mkdir('/tmp/m')\nfailed(libc.mount(b'none', b'/tmp/m', b'tmpfs', 0, None))",
    "remounts the root": _LIBC + "failed(libc.mount(b'none', b'/', None, 32 | 4096, None))",
    "unmounts": _LIBC + "failed(libc.umount2(b'/tmp', 2))",
    "makes a user namespace": _LIBC + "failed(libc.unshare(0x10000000))",
    "makes a namespace with clone": _LIBC
    + "failed(libc.syscall(56 if os.uname().machine == 'x86_64' else 220, 0x10000011, 0, 0, 0, 0))",
    "leaves by chroot": _TRY + "os.mkdir('/tmp/c')\nattempts(lambda: os.chroot('/tmp/c'))",
    "links out of /tmp": _TRY
    + """
os.symlink("/etc/shadow", "/tmp/a"); os.symlink("/usr", "/tmp/b"); os.symlink("../../../../root", "/tmp/c")
attempts(lambda: open("/tmp/a"), lambda: open("/tmp/b/x", "w"), lambda: os.listdir("/tmp/c"))
""",
    "writes to the interpreter": _TRY
    + """
attempts(lambda: open(sys.executable, "r+b"), lambda: open(os.__file__, "r+b"), lambda: os.unlink(os.__file__),
         lambda: os.chmod(os.__file__, 0o777), lambda: open(os.path.dirname(os.__file__) + "/sitecustomize.py", "w"))
""",
    "writes outside /tmp": _TRY
    + """
names = ("/x", "/usr/x", "/dev/x", "/dev/shm/x", "/var/tmp/x", "/etc/x", "/bin/x", "/proc/sys/kernel/hostname")
attempts(*[lambda n=n: open(n, "w") for n in names])
""",
    "fills the disk": """
written = 0
try:
    for number in range(1000):
        with open(f"/tmp/{number}", "wb") as file:
            written += file.write(bytes(2**20))
except OSError:
    pass
print("contained" if written <= 16 * 2**20 else f"escaped {written}")
""",
    "makes a huge file": _TRY + "open('/tmp/h', 'w').close()\nattempts(lambda: os.truncate('/tmp/h', 2**40))",
    "becomes root": _TRY
    + """
attempts(lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]), lambda: os.setresuid(0, 0, 0),
         lambda: os.getuid() and (_ for _ in ()).throw(OSError))
""",
    "gains privileges by a setuid program": _LIBC
    + "print('contained' if libc.prctl(39, 0, 0, 0, 0) == 1 else 'escaped')",
    "raises its limits": _TRY
    + """
import resource
limits = (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU)
attempts(*[lambda n=n: resource.setrlimit(n, (resource.RLIM_INFINITY,) * 2) for n in limits])
""",
    "hides memory in memfd": _TRY + "attempts(lambda: os.memfd_create('m'))",
    "hides memory in shared segments": _LIBC + "failed(libc.shmget(0, 2**20, 0o1777))",
    "hides memory in message queues": _LIBC + "failed(libc.msgget(0, 0o1777))",
    "starts io_uring": _LIBC + "failed(libc.syscall(425, 8, 0))",
    "reads the kernel's keys": _LIBC + "failed(libc.syscall(250 if os.uname().machine == 'x86_64' else 219, 0, -3, 0))",
    "loads a BPF program": _LIBC + "failed(libc.syscall(321 if os.uname().machine == 'x86_64' else 280, 0, 0, 0))",
    "makes a device": _TRY
    + "import stat\nattempts(lambda: os.mknod('/tmp/d', stat.S_IFBLK | 0o666, os.makedev(8, 0)))",
    "sets clock and host name": _TRY
    + "import socket, time\nattempts(lambda: time.clock_settime(0, 0), lambda: socket.sethostname('x'))",
    "uses inherited descriptors": _TRY + "attempts(*[lambda n=n: os.fstat(n) for n in range(3, 64)])",
    "starts many processes": """
import os, time
started = 0
for _ in range(200):
    try:
        if os.fork() == 0:
            time.sleep(100)
        started += 1
    except OSError:
        break
print("contained" if started < 4 else f"escaped {started}")
""",
    "starts many threads": """
import threading, time
started = 0
for _ in range(200):
    try:
        threading.Thread(target=time.sleep, args=(0.2,), daemon=True).start()
        started += 1
    except RuntimeError:
        break
print("contained" if started < 4 else f"escaped {started}")
""",
    "leaves a daemon": """
import os, sys
marker = sys.stdin.read().split()[3]
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv("/bin/sh", ["sh", "-c", "sleep 1000", marker])
    os._exit(0)
print("contained")
""",
    "kills the first process": "import os\ntry: os.kill(1, 9)\nexcept OSError: pass\nprint('contained')",
    "moves memory into its children": """
import os, time
parts = 0
for _ in range(20):
    try:
        if os.fork() == 0:
            x = bytearray(300 * 2**20); time.sleep(100)
        parts += 1
    except OSError:
        break
print("contained" if parts < 4 else "escaped")
""",
}

# Programs that a limit ends, with the kinds that they may end in.
LIMITED: dict[str, tuple[str, set[str]]] = {
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", {"time limit"}),
    "endless loop": ("while True: pass", {"time limit"}),
    "endless loop without signals": (
        "import signal\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "while True: pass",
        {"time limit", "runtime error"},
    ),
    "sleep": ("import time\ntime.sleep(1000)", {"time limit"}),
    "memory": ("x = []\nwhile True: x.append(bytearray(2**20))", {"memory limit"}),
    "large number": ("x = 10 ** 10 ** 10", {"time limit", "memory limit"}),
    "endless output": ("while True: print('x' * 1000)", {"output limit"}),
    "endless errors": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", {"output limit"}),
    "output of a child": (
        "import os\nos.fork()\nwhile True: os.write(1, b'x' * 4096)",
        {"output limit"},
    ),
    "signals to all": ("import os\nos.kill(-1, 9)\nos.kill(os.getpid(), 9)", {"runtime error"}),
    "end in atexit": ("import atexit, os\natexit.register(lambda: os._exit(0))\nprint('wrong')", {"wrong answer"}),
    "os._exit before the answer": ("import os\nos._exit(0)", {"wrong answer"}),
    "closed descriptors": ("import os\nos.closerange(0, 100)\nwhile True: pass", {"time limit"}),
    "deep source": ("(" * 100000, {"runtime error", "memory limit"}),
    "recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        {"runtime error", "memory limit", "time limit"},
    ),
    "stop of itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", {"time limit"}),
    "binary output": ("import os\nos.write(1, bytes(range(256)))", {"wrong answer"}),
    "trickle": ("import time\nwhile True:\n    print('x', flush=True)\n    time.sleep(0.01)", {"time limit"}),
}

# Programs that try to pass `assert add(2, 3) == 5` and `assert add(2, 5) == 7` without adding.
CHEATS: dict[str, str] = {
    "exits at its start": "import os\nos._exit(0)",
    "raises SystemExit": "raise SystemExit(0)",
    "exits when it is called": "import os\ndef add(a, b): os._exit(0)",
    "exits at the end": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef add(a, b): return 0",
    "returns what equals everything": "class Any:\n    def __eq__(self, other): return True\ndef add(a, b): return Any()",
    "returns a number that equals everything": (
        "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\ndef add(a, b): return Any(0)"
    ),
    "changes builtins": (
        "import builtins\nbuiltins.AssertionError = type('E', (BaseException,), {})\nbuiltins.exec = lambda *a: None\n"
        "builtins.compile = lambda *a, **k: None\ndef add(a, b): return 0"
    ),
    "writes a verdict": (
        'import os\nfor n in range(64):\n    try: os.write(n, b\'V{"kind": "passed"}\\n\' * 9)\n    except OSError: pass\n'
        "def add(a, b): return 0"
    ),
    "writes results of other calls": (
        'import os\nfor n in range(64):\n    try: os.write(n, b\'{"number": 1, "value": true}\\n\' * 9)\n'
        "    except OSError: pass\ndef add(a, b): return 0"
    ),
    "reads the tests": (
        "import gc, glob, re, sys\n"
        "def add(a, b):\n"
        "    texts = [o for o in gc.get_objects() if isinstance(o, dict)]\n"
        "    texts = [str(v) for o in texts for v in list(o.values()) if isinstance(v, str)]\n"
        "    frame, seen = sys._getframe(), []\n"
        "    while frame: seen.append(str(frame.f_locals)); frame = frame.f_back\n"
        "    for name in glob.glob('/tmp/*'): texts.append(open(name).read())\n"
        "    hits = [re.search(r'assert add\\((\\d+), (\\d+)\\) == (\\d+)', t) for t in texts + seen]\n"
        "    return next((int(h[3]) for h in hits if h), 0)"
    ),
    "replaces the encoder": (
        "import json, sys\nmain = sys.modules['__main__']\nmain.encode = lambda value: True\n"
        'json.dumps = lambda *a, **k: \'{"number": 1, "value": true}\'\ndef add(a, b): return 0'
    ),
    "raises AssertionError": "def add(a, b): raise AssertionError",
    "raises an exception named SystemExit": "def add(a, b):\n    raise type('SystemExit', (Exception,), {})",
    "kills its parent": "import os\ntry: os.kill(os.getppid(), 9)\nexcept OSError: pass\ndef add(a, b): return 0",
    "returns an endless list": "def add(a, b):\n    x = []\n    while True: x.append(0)",
    "returns itself": "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
    "returns a deep list": "def add(a, b):\n    x = []\n    for _ in range(10**5): x = [x]\n    return x",
    "returns too much": "def add(a, b): return 'x' * 10**8",
    "writes an endless line": (
        "import os\ndef add(a, b):\n    while True:\n        for n in range(3, 9):\n"
        "            try: os.write(n, b'x' * 9999)\n            except OSError: pass"
    ),
    "never returns": "import time\ndef add(a, b): time.sleep(1000)",
    "is not Python": "def add(a, b) return a + b",
    "is empty": "",
    "defines something else": "def sub(a, b): return a - b",
    "is a number": "add = 5",
}
