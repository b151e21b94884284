"""The program inside the sandbox: it drops its rights, sets its limits and executes the code from its standard input.

It is passed as text to `python -c`, because the sandbox shows no file of this project. Its arguments are those of
`Launch.runner_command`: numbers, where -1 leaves a limit or the user unchanged, then folders of packages. It avoids
`ast`, `json` and `traceback`, whose import would double the run time of an empty program.
"""

import _ast
import os
import resource
import site
import sys

user, ready, *numbers = map(int, sys.argv[1:9])

sys.path += sys.argv[9:]

sys.argv[1:] = []

if user >= 0:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)

for name, value in zip(("CPU", "AS", "FSIZE", "NOFILE", "NPROC", "CORE"), numbers, strict=True):
    if value >= 0:
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))

site.setquit()

site.sethelper()

source = sys.stdin.read()

sys.stdin = open(os.devnull)  # noqa: PTH123, SIM115 - stays open for as long as the code runs

# The supervisor inspects this process before the code begins. Without a supervisor, nothing would enforce the time
# limit.
os.write(ready, b"r")

if os.read(ready, 1) != b"g":
    sys.exit("the supervisor has disconnected")

os.close(ready)

del name, numbers, ready, user, value

try:
    # Like a notebook cell: the value of a last expression is printed.
    tree = compile(source, "<code>", "exec", _ast.PyCF_ONLY_AST)
    assert isinstance(tree, _ast.Module)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], _ast.Expr) else None
    # A separate module, in which pickle finds what the code defines.
    sys.modules["__main__"] = type(sys)("__main__")
    scope = vars(sys.modules["__main__"])
    exec(compile(tree, "<code>", "exec"), scope)  # noqa: S102 - the purpose of this program
    if isinstance(last, _ast.Expr):
        shown = eval(compile(_ast.Expression(last.value), "<code>", "eval"), scope)  # noqa: S307 - the same
        if shown is not None:
            print(repr(shown))  # noqa: T201 - the output of the code
except Exception as error:  # noqa: BLE001 - whatever the code raises
    # The traceback leaves out the lines of this program.
    frames = error.__traceback__ and error.__traceback__.tb_next
    sys.__excepthook__(type(error), error.with_traceback(frames), frames)
    sys.exit(1)
