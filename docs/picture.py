"""Draws docs/images/proof.svg: the example of the README, asked of the TPU compiler, as a terminal shows the answer.

python docs/picture.py          (half a minute; needs libtpu, no TPU)
"""

import os
import re
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
TARGET = "tpu:v5e:4x4"
COLUMN, LINE, MARGIN = 7.83, 19, 16


def proof_of_the_readme() -> str:
    """Run the README's program as it stands, for another target."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    program = next(block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "sx.prove" in block)
    names: dict[str, object] = {}
    exec(compile(program.replace('"cpu:16"', f'"{TARGET}"'), "train.py", "exec"), names)
    return str(names["proof"])


def svg(lines: list[str]) -> str:
    """Lines of text on a dark card."""
    width, height = max(map(len, lines)) * COLUMN + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN
    small_print = next(place for place, line in enumerate(lines) if line.startswith("cannot see"))
    rows: list[str] = []
    for place, line in enumerate(lines):
        dim = place >= small_print or "---" in line
        style = ' fill="#7ee2a8" font-weight="600"' if place == 0 else ' fill="#8b95a7"' if dim else ""
        y = MARGIN + LINE * place + 13
        rows.append(f'<text x="{MARGIN}" y="{y}"{style} xml:space="preserve">{escape(line)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" font-size="13" fill="#d6dbe5" '
        'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace">\n'
        f'<rect width="{width:.0f}" height="{height}" rx="8" fill="#161b26"/>\n' + "\n".join(rows) + "\n</svg>\n"
    )


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    target = ROOT / "docs" / "images" / "proof.svg"
    target.parent.mkdir(exist_ok=True)
    target.write_text(svg(proof_of_the_readme().splitlines()), encoding="utf-8")
