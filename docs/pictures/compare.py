"""A report of ``compare`` on a script with a fault in one unit, as a screen shows it.

python docs/pictures/compare.py [docs/pictures/compare.png]
"""

import subprocess
import sys
import textwrap
from pathlib import Path

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "python -m meshard compare --nproc-per-node 2 train.py"


def main() -> None:
    """Run the command, and draw what it prints."""
    script = [str(ROOT / "tests" / "compare" / "scripts" / "sharded.py"), "--fault", "factor"]
    command = [sys.executable, *COMMAND.split()[1:-1], *script]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=200).stdout
    assert "First difference" in printed, printed
    lines = [f"$ {COMMAND}"]
    for line in printed.splitlines():
        lines += textwrap.wrap(line, 112, subsequent_indent="      ", replace_whitespace=False)
    figure = Figure(figsize=(9.2, 0.3 + 0.19 * len(lines)), facecolor="#1d2330")
    for number, line in enumerate(lines):
        colour = "#ffb15c" if "unit" in line and "relative" in line else "#e8ecf2"
        if line.startswith(("First", "Possible", "$")):
            colour = "#8fd0a4"
        y = 1 - (number + 0.9) / (len(lines) + 0.6)
        figure.text(0.02, y, line, family="monospace", fontsize=9, color=colour, parse_math=False)
    path = sys.argv[1] if len(sys.argv) > 1 else Path(__file__).with_suffix(".png")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
