"""What the examples need beside meshard, or one line that says how to install it."""

try:
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    from tqdm import tqdm
except ModuleNotFoundError as missing:
    package = str(missing.name).partition(".")[0]
    line = f'the examples need {package}: pip install "meshard[examples]"'
    raise SystemExit(line) from None

__all__ = ["Figure", "Rectangle", "tqdm"]
