"""README's examples run as they stand, and print what they are said to print."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"

#: In a process of its own: the examples settle the number of devices.
RUN = """
import doctest, sys
program, session = sys.argv[1:]
names = {}
exec(program, names)
test = doctest.DocTestParser().get_doctest(session, names, "README", "README.md", 0)
sys.exit(doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed)
"""


def test_examples() -> None:
    program, session = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    session = re.sub(r"(?<=fingerprint) +[0-9a-f]{16}", " ...", session)
    done = subprocess.run([sys.executable, "-c", RUN, program, session], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
